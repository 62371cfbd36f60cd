"""Runs cases, and judges them: what was reported done is there, and loads with its values; nothing else is chosen."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sherd.storage.folder import Folder, faults
from sherd.storage.manifest import MANIFEST
from sherd.storage.places import PART, DiskPlace
from tests.checkpoint.kills import program
from tests.checkpoint.kills.cases import KILLS, Act, Case, Damage, Harm, Job, Target, drawn
from tests.checkpoint.kills.crews import LOADER, Crew, Ends
from tests.checkpoint.kills.program import Seen
from tests.support.ranks import Pools

TOGETHER = 3
"""Cases that run at a time. Most of a case's time is a wait."""
NEXT_NUMBER = 9000
_of_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one case: `wrong` is all that should not be."""

    case: Case
    wrong: tuple[str, ...]
    num_reached: int
    """How often the act has happened: a moment may be one that does not come."""
    num_done: int
    """Saves that were reported done."""
    num_damaged: int
    """Whole checkpoints that were damaged afterwards."""
    seconds: float
    """Of the longest start, until the last process had ended."""


class Judging:
    """What is found out about one case, and what of it is wrong."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.wrong = case, list[str]()
        self.path, self._reports = str(folder / "saved"), str(folder / "reports")
        self.folder = Folder(DiskPlace(folder / "saved"))
        self.damaged: set[int] = set()
        self.useless: set[int] = set()
        """Damaged ones that nobody may load. The others have a tensor file with a flipped bit: who does not read that
        file, since it holds another rank's generators, loads the right values."""

    def _reported(self, word: str) -> list[tuple[int, int, int, int]]:
        return program.reported(self._reports, word)

    @property
    def done(self) -> list[tuple[int, int, int, int]]:
        """The saves that were reported done: (job, rank, step, number)."""
        return self._reported("done")

    def require(self, is_right: object, otherwise: str) -> None:
        """Note what is wrong."""
        if not is_right:
            self.wrong.append(otherwise)

    # How the processes have ended

    def of_processes(self, ends: Ends, hit: int | None) -> None:
        """Each rank has come to its end, was killed, or has raised a CommError or, with its job, a CheckpointError."""
        case = self.case
        for end in ends.all:
            who = "the loader" if end.job == LOADER else f"rank {end.rank} of job {end.job}"
            self.require(not end.stack, f"{who} hangs:\n{end.stack}")
            self.wrong += [f"{who}: {each}" for each in end.wrong]
            may_be_killed = end.job == 0 and (case.act is Act.KILL_ALL or end.rank == hit)
            if end.was_killed and case.act in KILLS and may_be_killed:
                continue
            is_right = end.is_done or (end.error == "CommError" and end.job == 0 and case.act in (*KILLS, Act.CUT_OFF))
            self.require(is_right or end.stack, f"{who} has ended with {end.exit_code}, {end.error}: {end.text}")
            refusing = end.job == 0 and case.act in (Act.FULL, Act.READ_ONLY, Act.BROKEN)
            self.require(refusing or not end.refused, f"{who} was refused {end.refused}")
        for number in range(len(case.jobs)):
            told = {tuple(end.refused.items()) for end in ends.all if end.job == number and end.is_done}
            self.require(len(told) <= 1, f"the ranks of job {number} were told different things: {told}")

    # What is in the folder

    def whole(self) -> set[int]:
        """Returns the steps of the whole checkpoints, each byte of them read."""
        return {
            found.step
            for found in self.folder.whole()
            if not faults(found.place, found.manifest.files, found.manifest.block_bytes, verify=True)
        }

    def nothing_is_lost(self, steps: set[int], now: set[int], jobs: Sequence[Job]) -> None:
        """The checkpoints of `steps` are among those that are whole `now`, or `jobs` were to remove them."""
        rules = [job for job in jobs if job.keep_last is not None]
        for step in steps - now:
            newer = sum(other > step for other in now)
            is_old = any(
                newer >= (job.keep_last or 0) and (not job.keep_every or step % job.keep_every) for job in rules
            )
            self.require(is_old, f"step {step} was whole, and is gone: there are {now}")

    def damage(self, now: set[int]) -> None:
        """Do the case's damages, and note which whole checkpoints have them."""
        manifests = [Path(self.path) / f"step-{step:08d}" / MANIFEST for step in sorted(now)]
        for each in self.case.damages:
            draw = random.Random(each.seed)
            place = self._target(each.target, now)
            if place is None:
                continue
            names = sorted(path.name for path in place.iterdir() if path.is_file() and path.name != ".lock")
            if each.target is Target.LATEST:
                names = [name for name in names if name == "latest"]
            if not names and (each.harm is not Harm.TORN or each.target is Target.LATEST):
                continue
            name = MANIFEST if each.harm is Harm.TORN and each.target is not Target.LATEST else draw.choice(names)
            step = int(place.name.removeprefix("step-")) if place.name.startswith("step-") else None
            found = None if step is None else self.folder.found(step).manifest
            is_of_it = found is not None and name in {MANIFEST, *(file.name for file in found.files)}
            if _harm(place / name, each, draw, manifests) and is_of_it and step is not None:
                self.damaged.add(step)
                if each.harm is not Harm.FLIP or name == MANIFEST:
                    self.useless.add(step)

    def _target(self, target: Target, now: set[int]) -> Path | None:
        folder = Path(self.path)
        if target is Target.LATEST:
            return folder if folder.is_dir() else None
        steps = self.folder.steps()
        if target is Target.NEWEST:
            return folder / f"step-{max(now):08d}" if now else None
        half = [step for step in steps if step not in now]
        return folder / f"step-{half[0]:08d}" if half else None

    # What is loaded

    def seen_by_all(self, seen: list[Seen]) -> Seen:
        """Returns what all ranks of the judge have seen."""
        first = seen[0]
        for rank, each in enumerate(seen):
            same = (each.step, each.number, each.passed_over) == (first.step, first.number, first.passed_over)
            self.require(same, f"judge's rank {rank} saw {each}, rank 0 {first}")
            self.wrong += [f"judge's rank {rank}: step {each.step}, number {each.number}: {w}" for w in each.wrong]
        return first

    def is_of_its_step(self, seen: Seen) -> None:
        """The values are of a save of that step, and of none before the last that its job was told to be done."""
        of = [(job, number) for job, _, step, number in self._reported("begun") if step == seen.step]
        told = f"step {seen.step} has the values of save {seen.number}"
        self.require(seen.number in {number for _, number in of}, f"{told}, which is none of its")
        refused = {number for _, _, _, number in self._reported("refused")}
        self.require(seen.number not in refused, f"{told}, which was refused")
        for job, number in of:
            if number == seen.number:
                last = max((n for j, _, step, n in self.done if (j, step) == (job, seen.step)), default=0)
                self.require(number >= last, f"{told}, though {last} was done later")

    def loads(self, now: set[int], seen: list[list[Seen]]) -> None:
        """The newest that is not damaged is loaded, and each other one by its step. `seen` is by rank."""
        good = sorted(now - self.damaged, reverse=True)
        newest, *others = (self.seen_by_all([of_rank[at] for of_rank in seen]) for at in range(len(seen[0])))
        expected = good[0] if good else None
        is_right = newest.step == expected or self._may_be_read(newest.step, expected)
        self.require(is_right, f"{newest} was loaded, not step {expected}")
        has_manifest = any(MANIFEST in self.folder.folder_of(step).names() for step in self.folder.steps())
        self.require(newest.is_anew is not has_manifest or newest.step is not None, f"a run would begin anew: {newest}")
        for step in self.damaged:
            if newest.step is None or step > newest.step:
                self.require(f"step {step}:" in newest.passed_over, f"step {step} is not named: {newest.passed_over!r}")
        for each, step in zip(others, good, strict=True):
            self.require(each.step == step, f"{each} was loaded, not step {step}")
        for each in (newest, *others):
            if each.step is not None:
                self.is_of_its_step(each)

    def _may_be_read(self, step: int | None, expected: int | None) -> bool:
        """Returns whether the damaged `step` may be loaded instead of the older one that is `expected`."""
        return step in self.damaged - self.useless and (expected is None or step > expected)

    def goes_on(self, step: int, now: set[int], seen: list[Seen]) -> None:
        """The next save is loaded unless there are later ones, and nothing is left of what was killed."""
        found = self.seen_by_all(seen)
        expected = max({step} | (now - self.damaged))
        is_right = found.step == expected or self._may_be_read(found.step, expected)
        self.require(is_right, f"after the next save, of step {step}, {found} was loaded")
        self.require(found.step != step or found.number == NEXT_NUMBER, f"the next save, of step {step}, is {found}")
        names = self.folder.place.names()
        self.require(not [name for name in names if name.endswith(PART)], f"parts are left: {names}")
        for each in self.folder.steps():
            place, checkpoint = self.folder.folder_of(each), self.folder.found(each)
            if checkpoint.manifest is None:
                self.require(MANIFEST in place.names(), f"{place} is left, with {place.names()}")
                continue
            more = set(place.names()) - {MANIFEST, *(file.name for file in checkpoint.manifest.files)}
            self.require(not more, f"{place} has more than its files: {more}")


def _harm(path: Path, damage: Damage, draw: random.Random, manifests: list[Path]) -> bool:
    """Damage a file. Returns False if that changes nothing."""
    harm, raw = damage.harm, bytearray(path.read_bytes() if path.exists() else b"")
    if harm is Harm.DELETE:
        path.unlink()
        return True
    if harm is Harm.TORN:
        whole = [each.read_bytes() for each in manifests if each.exists()] or [b'{"format": "sherd/1"}']
        path.write_bytes(whole[-1][: draw.randrange(len(whole[-1]))])
        return True
    if harm is Harm.FLIP and raw:
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    elif harm is Harm.CUT and raw:
        del raw[draw.randrange(len(raw)) :]
    elif harm is Harm.GROW:
        raw += draw.randbytes(draw.choice((1, 100, 5000)))
    else:
        return False
    path.write_bytes(raw)
    return True


def run(case: Case, folder: Path, pools: Pools) -> Verdict:
    """Returns what became of `case`. Its files are in `folder`, and gone afterwards."""
    folder.mkdir(parents=True)
    try:
        judging, reached, seconds = Judging(case, folder), 0, 0.0
        for start, moment in enumerate(case.moments):
            ends = Crew(case, start, folder).run()
            judging.of_processes(ends, moment.rank)
            now = judging.whole()
            judging.nothing_is_lost({step for _, _, step, _ in judging.done}, now, case.jobs)
            reached, seconds = reached + ends.is_reached, max(seconds, ends.seconds)
        judging.damage(now)
        judge, good = case.judge, sorted(now - judging.damaged, reverse=True)
        world = pools.world(judge.num_ranks)
        judging.loads(now, world.run(program.look, judging.path, judge.layout, case.num_weights, tuple(good)))
        steps = [*judging.folder.steps(), *(step for job in case.jobs for step in job.steps)]
        step = judge.steps[0] if len(judge.steps) % 2 else max(steps) + 1
        seen = world.run(program.go_on, judging.path, judge, case.num_weights, step, NEXT_NUMBER)
        judging.goes_on(step, now, seen)
        # A flipped bit is not seen where old checkpoints are removed: nobody reads all bytes for that.
        kept = judging.whole() | (judging.damaged - judging.useless)
        judging.nothing_is_lost(now - judging.damaged, kept, [judge])
        return Verdict(case, tuple(judging.wrong), reached, len(judging.done), len(judging.damaged), seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_seed(seed: int, folder: Path) -> Verdict:
    """Returns what became of the case of `seed`. The judge's ranks are those of this thread."""
    if not hasattr(_of_thread, "pools"):
        _of_thread.pools = Pools()
    try:
        return run(drawn(seed), folder / str(seed), _of_thread.pools)
    except Exception as error:
        _of_thread.pools.stop()
        return Verdict(drawn(seed), (f"{type(error).__name__}: {error}",), 0, 0, 0, 0.0)


def run_all(seeds: Sequence[int], together: int = TOGETHER) -> Iterator[tuple[int, Verdict]]:
    """Yields seeds and verdicts in order. The folders are in memory where that can be: no test takes the power away."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="kills-", dir=memory if memory.is_dir() else None) as folder,
        ThreadPoolExecutor(together) as pool,
    ):
        yield from zip(seeds, pool.map(lambda seed: run_seed(seed, Path(folder)), seeds), strict=True)
