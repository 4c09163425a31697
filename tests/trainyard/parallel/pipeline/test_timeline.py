"""Pictures of schedules."""

from __future__ import annotations

from xml.etree import ElementTree

from trainyard.parallel.pipeline.schedule import Action, build_pipeline_schedule
from trainyard.parallel.pipeline.simulate import simulate
from trainyard.parallel.pipeline.timeline import legend, svg_timeline, text_timeline


def test_1f1b_is_drawn_to_scale() -> None:
    assert text_timeline(simulate(build_pipeline_schedule(3, 1, 4), 1)).splitlines() == [
        "rank 0 |0-1-2-........0===3-1===..2===..3===",
        "rank 1 |..0-1-....0===2-1===3-2===..3===....",
        "rank 2 |....0-0===1-1===2-2===3-3===........",
    ]


def test_chunks_are_letters() -> None:
    first, second = text_timeline(simulate(build_pipeline_schedule(2, 2, 2), 2)).splitlines()
    assert first == "rank 0 |0a-1a-0b-1b-......0b====...1b====0a====1a===="
    assert second == "rank 1 |...0a-1a-0b-0b====1b-1b====0a====1a====......"
    assert legend(2).endswith("a to b: chunk")
    assert "chunk" not in legend(1)


def test_a_wide_picture_is_cut_into_panels_of_one_width() -> None:
    text = text_timeline(simulate(build_pipeline_schedule(2, 1, 12), 1), width=60)
    panels = [panel.splitlines() for panel in text.split("\n\n")]
    assert len(panels) > 1
    assert all(len(line) <= 60 for panel in panels for line in panel)
    whole = "".join(panel[0].partition("|")[2] for panel in panels)
    assert len(whole) == (12 + 1) * 3 * 3


def test_a_long_picture_leaves_its_middle_out() -> None:
    text = text_timeline(simulate(build_pipeline_schedule(2, 1, 200), 1), width=80)
    assert text.count("rank 0") == 6
    assert "panels in between are left out" in text


def test_a_stage_without_work_takes_no_room() -> None:
    def cost(rank: int, action: Action) -> float:
        return 0.0 if rank == 0 else 2.0 if action.kind == "B" else 1.0

    lines = text_timeline(simulate(build_pipeline_schedule(2, 1, 3), 1, cost)).splitlines()
    assert set(lines[0].partition("|")[2]) == {"."}
    assert lines[1].partition("|")[2].startswith("0-0=")


def test_the_svg_has_every_action_and_is_well_formed() -> None:
    root = ElementTree.fromstring(
        svg_timeline(simulate(build_pipeline_schedule(2, 2, 4), 2), "a < b")
    )
    space = {"s": "http://www.w3.org/2000/svg"}
    titles = [title.text for title in root.findall(".//s:g/s:title", space)]
    assert len(titles) == 2 * 2 * 2 * 4
    assert titles[0] == "rank 0: forward of micro-batch 0, chunk 0, 0 to 1"
    assert "a < b" in [text.text for text in root.findall("s:text", space)]
