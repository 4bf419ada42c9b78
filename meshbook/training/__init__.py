"""Training of any model that maps inputs to logits: its state, one step, the loop, optimizers."""

from meshbook.training.loop import (
    compile_step, evaluate, evaluation_step, fit, mean_metrics, metrics_of, run, train_step,
    value_and_gradients
)
from meshbook.training.optimizers import (
    clipped, decayed, found_in, language_recipe, last_gradients, recipe, weights_of_moments
)
from meshbook.training.state import (
    Program, TrainState, abstract_state, as_it_is, check_labels, create_state,
    initialiser, laid_out, loss_and_metrics, nested, take_apart, weighted_mean
)

__all__ = [
    "Program", "TrainState", "abstract_state", "as_it_is", "check_labels", "clipped",
    "compile_step", "create_state", "decayed", "evaluate", "evaluation_step",
    "fit", "found_in", "initialiser", "laid_out", "language_recipe", "last_gradients",
    "loss_and_metrics", "mean_metrics", "metrics_of", "nested", "recipe", "run", "take_apart",
    "train_step", "value_and_gradients", "weighted_mean", "weights_of_moments",
]
