"""The library is built once for each state of its sources; where that is impossible, the reason is said."""

import os

import pytest
import torch

import simdevice
from simdevice import build
from simdevice.native import native

SOURCE = "int answer() { return 42; }\n"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A folder of sources with one short file, and a folder for builds."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "CACHE", tmp_path / "builds")
    return sources


@pytest.mark.slow
def test_the_same_sources_are_compiled_once_and_libraries_that_nobody_uses_go(folders):
    library = build.build()
    built = library.stat().st_mtime_ns
    assert build.build() == library
    assert library.stat().st_mtime_ns == built
    (folders / "two.cpp").write_text("int other() { return 1; }\n")
    assert build.build() != library
    assert library.exists(), "another environment may use it"
    os.utime(library.parent, times=(0, 0))
    (folders / "three.cpp").write_text("int third() { return 1; }\n")
    build.build()
    assert not library.exists()


def test_why_it_cannot_be_built_is_said_and_nothing_is_left(folders, monkeypatch):
    (folders / "one.cpp").write_text("int answer() { return forty_two; }\n")
    with pytest.raises(build.CannotBuild, match=r"one\.cpp: .*error: .*forty_two"):
        build.build()
    assert {path.name for path in build.CACHE.iterdir() if path.suffix != ".unfinished"} == {"lock", "objects"}
    assert not list(build.CACHE.glob("objects/*.o"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.CannotBuild, match="there is no compiler: no-such-compiler is not found"):
        build.build()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child below calls nothing but Python
def test_a_forked_process_cannot_use_the_device(device):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert torch.sim._is_in_bad_fork()
            simdevice.load()
        except RuntimeError as error:
            code = 0 if "before this process was forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("device")
def test_there_are_two_devices_unless_the_environment_says_otherwise_and_wrong_settings_are_refused_by_name():
    assert torch.accelerator.device_count() == native().device_count() == int(os.environ.get("SIM_DEVICES", "2"))
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    with pytest.raises(RuntimeError, match="and no sim:70"):
        torch.ones(1, device="sim:70")
    for wrong in ({"spoil": "yes"}, {"races": "all"}, {"pause_percent": 101}, {"pause_us": -1}):
        with pytest.raises((ValueError, RuntimeError), match=next(iter(wrong))):
            simdevice.configure(**wrong)
