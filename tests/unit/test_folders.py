"""A folder is there whole, or not at all."""

import signal
import threading

import pytest

from slipstream.folders import whole_folder


def test_a_folder_appears_when_it_is_whole(tmp_path):
    (tmp_path / "link").symlink_to("deep/er")
    with whole_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("a")
        assert not (tmp_path / "deep" / "er").exists()
    assert (tmp_path / "deep" / "er" / "a").read_text() == "a"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["er"]


def test_what_a_program_does_at_a_signal_is_its_own(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with whole_folder(tmp_path / "data"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert (tmp_path / "data").is_dir()


def test_a_thread_writes_too(tmp_path):
    def write():
        with whole_folder(tmp_path / "data"):
            pass

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert (tmp_path / "data").is_dir()


def test_a_fault_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "data") as folder:
        (folder / "a").write_text(str(1 / 0))
    assert list(tmp_path.iterdir()) == []
