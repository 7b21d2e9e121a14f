"""A sampling parameter that no stage reads is found at the import, not by its absence on a GPU."""

import msgspec
import pytest

from legato.core.sampling_params import STAGES, Draw, Filters, SamplingParams, check_stages


def test_a_field_that_no_stage_reads_is_refused() -> None:
    wider = msgspec.defstruct("Wider", [("typical_p", float, 1.0)], bases=(SamplingParams,))
    with pytest.raises(TypeError, match="typical_p"):
        check_stages(wider.__struct_fields__)
    with pytest.raises(TypeError, match="min_p"):
        check_stages(set(SamplingParams.__struct_fields__) - {"min_p"})


def test_a_draw_has_all_fields_of_its_stage() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=7)
    assert params.draw == Draw(0.5, Filters(top_p=0.9, top_k=3, min_p=0.1), seed=7)
    names = [name for name in Draw._fields if name != "filters"]
    assert {*names, *Filters._fields} == set(STAGES["draw"])
