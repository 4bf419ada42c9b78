"""Is it the same training? Two runs side by side: metrics, gradients, parameters."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshbook.proofs.rounding import FACTOR, copied, rounding_of
from meshbook.proofs.sharded import assert_replicas_equal
from meshbook.proofs.shards import wide
from meshbook.proofs.transfers import transfers
from meshbook.proofs.verdicts import ProofFailed, Verdict, device_name, named_leaves

TOLERANCE = 1e-5  # of the global norm of the gradients, or of the change of the parameters
ZERO = 1e-6  # of the same norm: perhaps mere rounding, which is then measured


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to train: what is done, and what it starts from.

    step(state, batch) -> (state, metrics), metrics a dict of scalars with a "loss", or the loss
    itself; dicts within it are metrics, too, such as "scalar/accuracy", and the loss may be the one
    whose name ends in "loss". It may donate the state. gradients(state, batch) -> a pytree, and
    params(state) -> a pytree, are compared where both runs have them; the leaves' paths must be the
    same in both runs. A gradient is best read from the program that trains: one step of it leaves
    the gradients in an optimizer's first moments. `meshbook.training.run` makes such a Run of a
    TrainState.
    """

    step: Callable
    state: Any
    gradients: Callable | None = None
    params: Callable | None = None


def assert_same_training(
    a: Run | tuple, b: Run | tuple, batches: Iterable, rtol: int | float = 2e-6,
    tolerance: int | float = TOLERANCE,
):
    """Prove that two runs train alike: every metric, the first gradients, the last parameters.

    a, b: Run, or a tuple of its fields; b is the reference, say one device. batches: what each step
    is given, one after the other; 20 of them are a good proof. Losses are compared at every step,
    relative to the larger (or to a hundredth of the first one, where training came close to zero),
    and so are all other scalars among the metrics, to `tolerance`. Gradients are compared at the
    first batch, leaf by leaf, to `tolerance` of the leaf's norm, or to what rounding makes of it,
    if that is more, but never to more than `tolerance` of their global norm. Parameters are
    compared after the last step to `tolerance` of the norm of the whole change, plus their
    rounding; without gradients, of that of the leaf's own change.
    tolerance: 1e-5 is for float32. What computes in bfloat16 needs 1e-2 or so, and a larger rtol;
    errors below that are then not seen.
    Use plain SGD for the parameters: Adam turns the rounding of a gradient that is truly zero into
    steps. And compare gradients in any case: Adam's steps are the same for gradients that are all
    four times too large, and so are its losses. Where neither gradients nor parameters are
    compared, the verdict says "losses only", and it is no proof. A leaf whose gradient is no more
    than its rounding in both runs is reported as zero, and its parameters are not compared: the
    rounding is measured, by gradients of the reference at weights that are changed in their last
    digit (`meshbook.proofs.rounding`). A metric that is 0 in both runs at
    every step is reported, too: an accuracy of 0 is as equal when it is eight times too large. So
    are metrics that are no scalars, which are not compared, and parameters that no step changes.
    Runs at the highest matmul precision, on copies: the states that you pass stay alive. Gradients
    and parameters are brought to the host: this process must see all devices of both runs.
    Raises ProofFailed, naming step or leaf, expected and found, also where run a sends something
    from device to device outside of a compiled program (`meshbook.proofs.transfers`); ValueError
    without batches, a loss or a leaf to compare, or where only one run can be asked for its
    gradients or parameters.

    >>> assert_same_training(run(sharded, key), run(single, key), batches)
    same training: 20 steps, losses within 1.2e-07 (allowed 2e-06), gradients 3.1e-07 (1e-05), ...
    """
    a, b = (run if isinstance(run, Run) else Run(*run) for run in (a, b))
    for what in ("gradients", "params"):
        if (getattr(a, what) is None) != (getattr(b, what) is None):
            raise ValueError(f"expected {what} from both runs or from neither, found it in one")
    batches = list(batches)
    if not batches:
        raise ValueError("expected at least one batch to train on, found none")
    with jax.default_matmul_precision("highest"):
        compared = a.params and b.params
        starts = [named_leaves(run.params(copied(run.state))) for run in (a, b)] if compared else []
        if compared:
            starts = _compare_starts(*starts)
        gradients, zero = _compare_gradients(a, b, batches[0], tolerance)
        ends, metrics, worst, left_out = _train(a, b, batches, rtol, tolerance)
        parameters, change = None, None
        if compared:
            leaf_by_leaf = gradients is None
            parameters, change = _compare_parameters(
                a, b, starts, ends, zero, len(batches), tolerance, leaf_by_leaf)
    losses = [(ours["loss"], theirs["loss"]) for ours, theirs in metrics]
    kind = "losses only" if gradients is parameters is None else "same training"
    line = f"{kind}: {len(batches)} steps, losses within {worst['loss']:.1e} (allowed {rtol:.0e})"
    still = [name for name in worst if not any(each[name] for step in metrics for each in step)]
    others = {name: apart for name, apart in worst.items() if name not in ("loss", *still)}
    if others:
        line += f", {', '.join(others)} {max(others.values()):.1e} ({tolerance:.0e})"
    for what, apart in (("gradients", gradients), ("parameters", parameters)):
        line += "" if apart is None else f", {what} {apart:.1e} ({tolerance:.0e})"
    line += f"; gradient zero, not compared: {', '.join(zero)}" if zero else ""
    line += f"; zero at every step, which says nothing: {', '.join(still)}" if still else ""
    line += f"; no scalars, not compared: {', '.join(left_out)}" if left_out else ""
    line += "; no step changed a parameter, which says nothing" if change == 0 else ""
    return Verdict(line, losses=losses, loss_difference=worst["loss"], metric_differences=worst,
                   gradient_difference=gradients, parameter_difference=parameters, zero=zero,
                   still=still, left_out=left_out)


def _train(a, b, batches, rtol, tolerance):
    """Both runs, a step at a time: last states, metrics of each step, largest differences, and the
    names of metrics that are no scalars.
    """
    states, seen, worst, left_out = [copied(a.state), copied(b.state)], [], {}, []
    for number, batch in enumerate(batches):
        states[0], ours = _alone(a, states[0], batch, number)
        states[1], theirs = b.step(states[1], batch)
        ours, theirs = (_metrics(metrics, which) for metrics, which in ((ours, "a"), (theirs, "b")))
        left_out = sorted(name for each in (ours, theirs) for name in each
                          if name != "loss" and not _is_scalar(each[name]))
        ours, theirs = (_scalars(metrics, number, which)
                        for metrics, which in ((ours, "a"), (theirs, "b")))
        if ours.keys() != theirs.keys():
            raise ProofFailed(f"metrics at step {number}: expected {', '.join(theirs)}, found "
                              f"{', '.join(ours)}", leaf="metrics", expected=sorted(theirs),
                              found=sorted(ours))
        first = seen[0][1] if seen else {name: theirs[name][0][1] for name in theirs}
        for name in ours:
            allowed = rtol if name == "loss" else tolerance
            reference, floor = theirs[name][0][1], 0.01 * abs(first[name])
            for device, value in ours[name] + theirs[name]:
                apart = abs(value - reference) / max(abs(value), abs(reference), floor, 1e-30)
                worst[name] = max(worst.get(name, 0.0), apart)
                if apart > allowed:
                    raise ProofFailed(
                        f"{name} at step {number}, {device_name(device)}: expected "
                        f"{reference:.9g}, found {value:.9g}, {apart:.1e} apart (allowed "
                        f"{allowed:.0e})", leaf=name, device=device.id, expected=reference,
                        found=value)
        seen.append(tuple({name: values[0][1] for name, values in each.items()}
                          for each in (ours, theirs)))
    return states, seen, worst, list(dict.fromkeys(left_out))


def _metrics(metrics, which):
    """{name: metric}, of dicts within the metrics, too; the loss is called "loss"."""
    if not isinstance(metrics, Mapping):
        return {"loss": metrics}
    found = named_leaves(metrics)
    losses = [name for name in found if name.endswith("loss")]
    if "loss" not in found and len(losses) != 1:
        raise ValueError(f"expected one metric of run {which} that is called loss, or ends in it; "
                         f"found {', '.join(losses or found) or 'none'}")
    return {("loss" if "loss" not in found and name in losses else name): value
            for name, value in found.items()}


def _is_scalar(value):
    is_number = isinstance(value, (float, int, np.ndarray, np.generic, jax.Array))
    return is_number and not np.shape(value)


def _alone(run, state, batch, number):
    """A step, in which nothing may go past the programs whose collectives can be counted."""
    with transfers() as sent:
        try:
            result = run.step(state, batch)
        except jax.errors.JaxRuntimeError as error:
            if "Disallowed device-to-device transfer" not in str(error):
                raise
            raise ProofFailed(f"step {number}: expected arguments that lie where the program wants "
                              f"them, found one that jit had to move: {error}",
                              leaf="sent", expected=0) from error
    if sent.count:
        raise ProofFailed(
            f"step {number}: expected nothing to be sent outside of the compiled program, found "
            f"{sent.count} arrays and {sent.bytes:,} bytes by jax.device_put", leaf="sent",
            expected=0, found=sent.bytes)
    return result


def _scalars(metrics, number, which):
    """Each metric as each device has it: one that should be replicated can still differ."""
    found = {}
    for name, value in metrics.items():
        if name != "loss" and not _is_scalar(value):
            continue  # what is no scalar is not a metric of the whole step
        if not isinstance(value, (float, int, np.ndarray, np.generic, jax.Array)):
            raise ValueError(f"expected a scalar loss from run {which}, or a dict of metrics; "
                             f"found {type(value).__name__}")
        value = jnp.asarray(value)
        if value.shape:
            raise ValueError(f"expected a scalar loss from run {which}, found shape {value.shape}")
        found[name] = [(shard.device, wide(shard.data).item())
                       for shard in value.addressable_shards]
        for device, number_found in found[name]:
            if not np.isfinite(number_found):
                raise ProofFailed(f"{name} of run {which} at step {number}, {device_name(device)}: "
                                  f"expected a finite number, found {number_found}", leaf=name,
                                  device=device.id, expected="finite", found=number_found)
    return found


def _compare_gradients(a, b, batch, tolerance):
    """The largest difference over the global norm, and the names of the leaves that are zero."""
    if not (a.gradients and b.gradients):
        return None, []
    trees = [named_leaves(run.gradients(copied(run.state), batch)) for run in (a, b)]
    ours, theirs = _matched(*trees, "gradients")
    norm = max(_norm(ours.values()), _norm(theirs.values()))
    if norm == 0:
        raise ProofFailed("gradients: expected a norm above zero, found 0 in both runs",
                          leaf="gradients", expected="above 0", found=0.0)
    sizes = {name: max(_norm([ours[name]]), _norm([theirs[name]])) for name in ours}
    rounding = dict.fromkeys(ours, 0.0)
    if any(size <= ZERO * norm or _norm([ours[name] - theirs[name]]) > tolerance * size
           for name, size in sizes.items() if size):
        rounding = rounding_of(
            lambda state: b.gradients(state, batch), b.state, theirs, _step(tolerance))
    zero = [name for name, size in sizes.items() if size <= min(
        FACTOR * rounding[name], tolerance * norm)]
    return max((
        _apart(ours, theirs, name, norm, min(max(tolerance * size, FACTOR * rounding[name]),
                                             tolerance * norm), "gradient", "the global norm")
        for name, size in sizes.items() if name not in zero), default=0.0), zero


def _step(tolerance):
    """By how much weights are nudged: by their own rounding, or what stands for a coarser one."""
    return tolerance / FACTOR if tolerance > TOLERANCE else 0.0


def _compare_starts(ours, theirs):
    """Both runs' parameters on the host, which are the same in each leaf."""
    ours, theirs = _matched(ours, theirs, "parameters")
    for name in ours:
        size = _norm([theirs[name]])
        _apart(ours, theirs, name, size, ZERO * size, "parameter at the start", "the leaf's norm")
    return ours, theirs


def _compare_parameters(a, b, starts, ends, zero, steps, tolerance, leaf_by_leaf):
    """The largest difference of the trained parameters over the norm of the whole change; that."""
    reference = starts[1]
    trees = [named_leaves(run.params(end)) for run, end in zip((a, b), ends, strict=True)]
    ours, theirs = _matched(*trees, "parameters")
    change = _norm(theirs[name] - reference[name] for name in theirs)
    rounding = math.sqrt(steps) * np.finfo(np.float32).eps
    of = lambda name: _norm([theirs[name] - reference[name]]) if leaf_by_leaf else change
    return max((
        _apart(ours, theirs, name, change, tolerance * of(name) + rounding * _norm([theirs[name]]),
               "parameter after the last step", "the whole change")
        for name in ours if name not in zero), default=0.0), change


def _matched(ours, theirs, what):
    """Both trees on the host, after a look at names, shapes, replicas and NaNs."""
    if ours.keys() != theirs.keys():
        only = [", ".join(sorted(x.keys() - y.keys())[:4]) or "nothing"
                for x, y in ((ours, theirs), (theirs, ours))]
        raise ProofFailed(f"{what}: expected the same leaves in both runs, found only in the "
                          f"first: {only[0]}; only in the second: {only[1]}",
                          leaf=what, expected=sorted(theirs), found=sorted(ours))
    if not ours:
        raise ValueError(f"{what}: expected at least one leaf to compare, found none")
    assert_replicas_equal({what: ours})
    assert_replicas_equal({what: theirs})
    trees = [{name: wide(leaf) for name, leaf in tree.items()} for tree in (ours, theirs)]
    for name in ours:
        shapes = [tree[name].shape for tree in trees]
        if shapes[0] != shapes[1]:
            raise ProofFailed(f"{what}, leaf {name}: expected shape {shapes[1]}, found {shapes[0]}",
                              leaf=name, expected=shapes[1], found=shapes[0])
        if not all(np.all(np.isfinite(tree[name])) for tree in trees):
            raise ProofFailed(f"{what}, leaf {name}: expected finite numbers, found inf or NaN",
                              leaf=name, expected="finite", found="inf or NaN")
    return trees


def _norm(leaves):
    return math.sqrt(sum(float(np.sum(np.abs(leaf) ** 2)) for leaf in leaves))


def _apart(ours, theirs, name, norm, allowed, what, of):
    """How far one leaf is apart, as a share of a norm; ProofFailed beyond what is allowed."""
    difference = np.abs(ours[name] - theirs[name])
    apart = _norm([difference])
    if apart > allowed:
        at = np.unravel_index(np.argmax(difference), difference.shape)
        expected, found = theirs[name][at].item(), ours[name][at].item()
        raise ProofFailed(
            f"{what}, leaf {name}: {apart / (norm or 1):.1e} of {of} apart (allowed "
            f"{allowed / (norm or 1):.0e}); most at {tuple(map(int, at))}: "
            f"expected {expected:.9g}, found {found:.9g}",
            leaf=name, expected=expected, found=found)
    return apart / norm if norm else 0.0
