import io

from rich.console import Console

from slipstream.data import Progress
from slipstream.data.prepare_progress import PrepareReporter, progress_line


def test_a_line_says_what_is_known() -> None:
    first = Progress(phase="survey", num_bytes=2_500_000, total_bytes=0)
    assert progress_line(first, elapsed_s=0.5) == "survey | 2.5 MB | 5.0 MB/s"
    later = Progress(phase="write", num_bytes=10**9, total_bytes=10**11, num_tokens=25 * 10**7)
    assert progress_line(later, elapsed_s=100.0) == (
        "write | 1,000.0 of 100,000.0 MB | 250.0M tokens | 10.0 MB/s | 2h 45m left"
    )


def test_lines_come_now_and_then_and_start_anew_with_each_phase() -> None:
    seconds = iter([0, 0, 4, 6, 7, 20, 21, 24, 26])
    out = io.StringIO()
    with PrepareReporter(Console(file=out, width=200), clock=lambda: float(next(seconds))) as reporter:
        for i in range(4):
            reporter(Progress(phase="survey", num_bytes=i * 10**6, total_bytes=0))
        for i in range(4):
            reporter(Progress(phase="write", num_bytes=i * 10**6, total_bytes=4 * 10**6))
    assert out.getvalue().splitlines() == ["survey | 2.0 MB | 0.3 MB/s", "write | 3.0 of 4.0 MB | 0.5 MB/s | 2s left"]


def test_a_terminal_shows_one_status() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    seconds = iter([0.0, 0.0, 9.0])
    with PrepareReporter(console, clock=lambda: next(seconds)) as reporter:
        reporter(Progress(phase="survey", num_bytes=10**6, total_bytes=0))
        reporter(Progress(phase="survey", num_bytes=9 * 10**6, total_bytes=0))
    assert "survey | 9.0 MB | 1.0 MB/s" in out.getvalue()
