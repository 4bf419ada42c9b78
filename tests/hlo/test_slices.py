"""What crosses from slice to slice is counted, in loops too, and nothing else is."""
import pytest

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.hlo.collectives import Moved
from meshbook.hlo.slices import between_slices
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.mesh_programs import SLICED, name_of_slices
from meshbook.planning.programs import recorded_program

SEND = """HloModule crossing, num_partitions=4

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128] parameter(0)
  %start = token[] after-all()
  %send = (f32[8,128], u32[], token[]) send(%x, %start), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[8,128], u32[], token[]) recv(%start), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %done = (f32[8,128], token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %y = f32[8,128] get-tuple-element(%done), index=0
}
"""


def test_a_send_is_counted_once_by_what_it_is_a_part_of():
    assert between_slices(SEND) == {"all-reduce": Moved(1, 4 * 8 * 128)}
    gathered = SEND.replace("ALL_REDUCE", "ALL_GATHER")
    assert between_slices(gathered) == {"all-gather": Moved(1, 4 * 8 * 128)}


def test_a_send_to_the_host_does_not_cross():
    assert between_slices(SEND.replace("_xla_megascale_transfer_type", "_xla_other")) == {}


def test_bytes_of_gradients_by_formula_in_whole_and_hybrid():
    config = DecoderConfig(**SLICED)
    step = describe(config, Plan(), 1)
    outside = sum(each.stored for each in step.placed if not each.in_layers)
    wide = outside + 2 * config.layers * config.embed  # table and norms
    narrow = step.numbers["stored"] - wide
    found = {how: between_slices(recorded_program(name_of_slices(how))[0])
             for how in ("whole", "hybrid", "all chips")}
    assert found["hybrid"]["all-reduce"].bytes == (2 * narrow + 4 * wide) // 4 + 512
    assert found["hybrid"]["all-reduce"].bytes != (4 * narrow + 4 * wide) // 4 + 512  # float32
    whole = found["whole"]["all-reduce"].bytes
    assert whole == pytest.approx(found["hybrid"]["all-reduce"].bytes, rel=1e-3)
    assert sum(each.bytes for each in found["all chips"].values()) > 1.5 * whole
    # of gathered weights a chip sends its eighth, and receives as much
    assert found["all chips"]["all-gather"].bytes == pytest.approx(
        (2 * narrow + 4 * wide) / 8, rel=1e-3)
