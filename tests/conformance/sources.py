"""The tests of the PyTorch 2.6 tree, from Debian's source package. Nothing of them is kept in this repository."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".conformance"
GIVEN = "FSDP_CONFORMANCE_SRC"
RELEASE, VERSION = "trixie", "2.6.0"


def source_tree() -> Path:
    """Returns the folder with `test/distributed`: the one that `FSDP_CONFORMANCE_SRC` names, or what apt brings.

    Raises:
        SystemExit: the sources cannot be had; the reason is one line.
    """
    tree = Path(os.environ.get(GIVEN) or FOLDER / f"pytorch-{VERSION}")
    if (tree / "test/distributed").is_dir():
        return tree
    if os.environ.get(GIVEN):
        sys.exit(f"{GIVEN}={tree} has no folder test/distributed")
    FOLDER.mkdir(exist_ok=True)
    try:
        _unpack(_downloaded(), tree)
    except (OSError, subprocess.CalledProcessError, StopIteration) as error:
        said = getattr(error, "stderr", "") or str(error) or "there is no archive of this version"
        sys.exit(
            f"the sources of PyTorch {VERSION} cannot be had by apt ({' '.join(said.split())[-200:]}); {GIVEN}= may "
            "name a folder with them"
        )
    return tree


def _downloaded() -> Path:
    """Returns the archive that `apt-get source` brought, from the mirror that this machine has packages of."""
    repositories = _said("apt-get", "indextargets", "--format", "$(REPO_URI)").split()
    mirror = next((each for each in repositories if each.rstrip("/").endswith("/debian")), None)
    if mirror is None:
        raise OSError("apt knows no mirror of Debian")
    (FOLDER / "sources.list").write_text(f"deb-src {mirror} {RELEASE} main\n")
    # Lists of its own: nothing of the machine's changes, and nobody has to be root.
    own = {"Etc::SourceList": "sources.list", "Etc::SourceParts": "none", "State::Lists": "lists", "Cache": "cache"}
    options = [f"-oDir::{key}={FOLDER / name}" for key, name in own.items()]
    for folder in ("lists/partial", "cache/archives/partial"):
        (FOLDER / folder).mkdir(parents=True, exist_ok=True)
    _said("apt-get", *options, "update")
    _said("apt-get", *options, "source", "--download-only", "pytorch")
    return next(FOLDER.glob(f"pytorch_{VERSION}*.orig.tar.*"))


def _said(*command: str) -> str:
    return subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True).stdout


def _unpack(archive: Path, tree: Path) -> None:
    with tarfile.open(archive) as files:
        for member in files:
            _, _, name = member.name.partition("/")
            if name.startswith("test/distributed/") and member.isfile():
                member.name = name
                files.extract(member, tree, filter="data")
