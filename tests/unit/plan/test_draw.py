import re
import xml.etree.ElementTree as ElementTree

import pytest

from slipstream.plan.draw import draw_rich, draw_svg, draw_text
from slipstream.plan.simulate import SimulateConfig, Timeline, build_timeline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def two_bw() -> Timeline:
    return build_timeline(SimulateConfig(num_stages=3, num_microbatches=3, num_batches=3, optimizer_ms=1))


@pytest.fixture
def flushing() -> Timeline:
    return build_timeline(
        SimulateConfig(pipeline_schedule="one_f_one_b", num_stages=3, num_microbatches=3, num_batches=3, optimizer_ms=1)
    )


def test_terminal_drawing(two_bw: Timeline) -> None:
    assert draw_text(two_bw, width=50).splitlines()[:3] == [
        "stage 0  012····₀▁3₁▁4₂▁5₃▁█6₄▁7₅▁8₆▁█₇▁·₈▁█",
        "stage 1  ·01··₀▁2₁▁3₂▁4₃▁5₄▁█6₅▁7₆▁8₇▁█₈▁··█",
        "stage 2  ··0₀▁1₁▁2₂▁3₃▁4₄▁5₅▁█6₆▁7₇▁8₈▁█···█",
    ]


def test_drawing_that_does_not_fit_is_cut(two_bw: Timeline) -> None:
    rows = draw_text(two_bw, width=30).splitlines()[:3]
    assert [len(row) for row in rows] == [30, 30, 30]
    assert all(row.endswith("…") for row in rows)


def test_wide_terminals_get_wide_bars(two_bw: Timeline) -> None:
    assert draw_text(two_bw, width=200).startswith("stage 0  0▔▔1▔▔2▔▔······")


def test_colours_change_no_character(two_bw: Timeline) -> None:
    assert draw_rich(two_bw, width=80).plain == draw_text(two_bw, width=80)
    assert {str(span.style) for span in draw_rich(two_bw, width=80).spans} >= {"white on color(25)", "reverse"}


def test_rows_are_ranks_where_a_rank_holds_several_stages() -> None:
    timeline = build_timeline(SimulateConfig(pipeline_schedule="interleaved", num_stages=2))
    assert draw_text(timeline).startswith("rank 0  ")


def test_empty_and_timeless_timelines_can_be_drawn() -> None:
    timeless = build_timeline(SimulateConfig(forward_ms=0, backward_ms=0))
    for timeline in (timeless, Timeline(ranks=(), num_microbatches=1), Timeline(ranks=((),), num_microbatches=1)):
        assert "idle" in draw_text(timeline)
        ElementTree.fromstring(draw_svg([("nothing", timeline)], title="nothing"))


def bars(svg: str) -> list[str]:
    """Texts that appear on pointing at a bar."""
    return [title.text or "" for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def test_svg_shows_every_action_of_both_panels_on_one_axis(two_bw: Timeline, flushing: Timeline) -> None:
    svg = draw_svg([("1F1B", flushing), ("2BW", two_bw)], title="with and without flush")
    expected = [
        span for timeline in (flushing, two_bw) for rank in timeline.ranks for span in rank if span.action.op != "N"
    ]
    assert [text.split()[0] for text in bars(svg)] == [str(span.action) for span in expected]
    rights = [
        float(rect.get("x", 0)) + float(rect.get("width", 0))
        for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if rect.get("fill") == "url(#timeline-idle)" and float(rect.get("width", 0)) > 20
    ]
    assert max(rights) == pytest.approx(700 - 18, abs=0.1)
    assert min(rights) == pytest.approx(66 + (700 - 84) * two_bw.makespan_ms / flushing.makespan_ms, abs=0.1)


def test_svg_stands_alone_and_follows_the_colour_scheme(two_bw: Timeline) -> None:
    svg = draw_svg([("2BW", two_bw)], title="a")
    assert "prefers-color-scheme:dark" in svg
    assert set(re.findall(r"https?://[^\"' ]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<(script|image|link|use)\b|@import", svg)
    for word in ("forward", "backward", "optimizer step", "idle", "ms"):
        assert f">{word}</text>" in svg


def test_svg_escapes_what_it_is_given(two_bw: Timeline) -> None:
    root = ElementTree.fromstring(draw_svg([('a < b & "c"', two_bw)], title='<&">'))
    assert root.get("aria-label", "").startswith('<&">. a < b & "c": ')


def test_svg_can_stop_early(two_bw: Timeline) -> None:
    shown = bars(draw_svg([("2BW", two_bw)], title="a", end_ms=10))
    assert shown[0].startswith("0F0@0 0 to 1 ms")
    assert not [text for text in shown if "O@" in text]
    assert 0 < len(shown) < len(bars(draw_svg([("2BW", two_bw)], title="a")))


def test_svg_texts_stay_inside(two_bw: Timeline, flushing: Timeline) -> None:
    root = ElementTree.fromstring(draw_svg([("1F1B", flushing), ("2BW", two_bw)], title="a"))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("y", 0)) < height
        left = float(text.get("x", 0))
        if text.get("text-anchor") is None and "n" not in (text.get("class") or "").split():
            assert left + 6.6 * len(text.text or "") < width
