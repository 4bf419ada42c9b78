"""A ViT's training as one side of `assert_same_training`, and where the rules put its tensors."""
import jax
from jax.sharding import PartitionSpec as P

from meshbook import training

KEY = jax.random.key(7)
QUICKLY = {"xla_backend_optimization_level": 0}  # the same HLO, half the compile time
TENSOR_PARALLEL = {
    "DSHK": P(None, None, "model"), "SHK": P(None, "model"), "HKD": P("model"),
    "DF": P(None, "model"), "F": P("model"), "FD": P("model"),
    "VD": P("model"), "DV": P(None, "model"), "V": P("model")}
# Written down once more: what a test expects must not come from the table that it checks.
RULES = {
    "tensor_parallel": TENSOR_PARALLEL,
    "fully_sharded": TENSOR_PARALLEL | {
        "XD": P(None, "batch"), "TD": P(None, "batch"), "D": P("batch"),
        "DSHK": P("batch", None, "model"), "HKD": P("model", None, "batch"),
        "DF": P("batch", "model"), "FD": P("model", "batch"), "DC": P("batch"),
        "VD": P("model", "batch"), "DV": P("batch", "model")}}


def run(state, program=None):
    """The training that this program does, from this state."""
    return training.run(state, KEY, program)
