"""The training state under ZeRO by formula: the paper's recipe, float32, and bad input."""
import pytest

from meshbook.costs.memory import zero_state


@pytest.mark.parametrize("stage, wide, narrow", [
    (0, 16.0, 16.0), (1, 8.125, 4.1875), (2, 4.1875, 2.21875), (3, 0.25, 0.25)])
def test_bytes_for_a_parameter_on_64_devices(stage, wide, narrow):
    assert sum(zero_state(stage, 64, 64).values()) / 64 == wide
    assert sum(zero_state(stage, 64, 64, narrow=True).values()) / 64 == narrow


def test_what_is_split_by_stage():
    assert zero_state(2, 10, 2, narrow=True) == {
        "parameters": 20, "gradients": 10, "moments": 40, "master weights": 20}


def test_another_stage_is_refused():
    with pytest.raises(ValueError, match="stage 0, 1, 2 or 3 of ZeRO; found 4"):
        zero_state(4, 10, 2)
