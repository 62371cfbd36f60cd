"""The order of a run: steps, evaluations, checkpoints, and the end."""

from __future__ import annotations

import hashlib
import math
import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from sherd import Muon, clip_grad_norm_, flatten_optimizer
from sherd.optim.muon import left_to_adamw
from sherd.storage.folder import Folder
from sherd.train.axes import Axes
from sherd.train.checkpoint import Saver, load, shapes
from sherd.train.config import Config, InputError, OptimizerConfig
from sherd.train.data import Windows, batch, tokens
from sherd.train.judging import Score, judge
from sherd.train.mesh import RankGrid
from sherd.train.parallel import build
from sherd.train.passes import Batch, passes
from sherd.train.ranks import on_rank_0
from sherd.train.report import Silent, peak_memory
from sherd.train.sampling import Draw, continued, readable
from sherd.train.saved import Best, Checkpoint, place_in
from sherd.train.text import Corpus

__all__ = ["StepFigures", "Trainer", "introduce", "learning_rate", "lzma_bits", "train"]

PLANNED_AFTER = 20  # steps
QUICK_WINDOWS = 64  # of an evaluation between steps; the last one takes them all


def learning_rate(step: int, num_steps: int, choice: OptimizerConfig) -> float:
    """The rate of step 0, 1, ..., num_steps - 1: a line up to the peak, then half a cosine down.

    While `num_steps` is 0, not yet known, the peak lasts.
    """
    if step < choice.warmup:
        return choice.lr * (step + 1) / choice.warmup
    if not num_steps:
        return choice.lr
    progress = (step - choice.warmup) / max(1, num_steps - 1 - choice.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return choice.lr * (choice.final_lr + (1 - choice.final_lr) * cosine)


def lzma_bits(text: bytes) -> float | None:
    """Bits per byte lzma needs for `text` alone, at its highest preset; None where Python has no lzma."""
    try:
        import lzma
    except ImportError:
        return None
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step. `loss`: mean over the batch, before the update, in bits per byte."""

    loss: float
    gradient_norm: float
    learning_rate: float
    stop: bool  # some rank was asked to stop
    saved: bool  # all ranks have written their part of the checkpoint that was under way


class Trainer:
    """A sharded model, its optimizer, and the number of steps done. Every rank calls each method alike."""

    def __init__(self, config: Config, corpus: Corpus, grid: RankGrid) -> None:
        self.config, self.corpus, self.grid = config, corpus, grid
        self.split = config.split(grid.axes.num_data, grid.axes.pp)
        self.device = torch.device(grid.device_type)
        self.model = build(config, grid)
        self.passes = passes(self.model, grid, config)
        self.optimizer = _optimizer_of(self.model, config.optimizer)
        self.text, self.windows = tokens(corpus.train), Windows(tokens(corpus.held_out), config.data.context)
        self.done = 0
        self.seconds = 0.0  # spent in steps by this process
        self._latest: deque[float] = deque(maxlen=PLANNED_AFTER)  # of them, one by one

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return 0 < self.config.run.steps <= self.done

    @property
    def seconds_per_step(self) -> float:
        """The seconds that a step takes, of late."""
        return statistics.median(self._latest)

    def resume(self, checkpoint: Checkpoint) -> Checkpoint:
        """Take the state of the newest undamaged checkpoint, `checkpoint` if it is that, and return it.

        Raises:
            InputError: there is none, or it is of another model.
        """
        assert checkpoint.folder is not None, "a run's checkpoints lie in a folder"
        found = load(checkpoint.folder, checkpoint, self.model, self.optimizer)
        self.done = found.step
        return found

    def step(self, stop: bool = False, saved: bool = False) -> StepFigures:
        """Make one update, from the batch that the number of steps done decides.

        The result's `stop` is true if `stop` is on any rank; its `saved` is true if `saved` is on all ranks.

        Raises:
            InputError: the loss or its gradient is no longer finite.
        """
        begun, choice, num_steps = time.monotonic(), self.config.optimizer, self.config.run.steps
        # Dropout draws from the global generator: seeded anew here, it survives a resume without being saved.
        torch.manual_seed(hash((self.config.run.seed, self.done, dist.get_rank())))
        self.model.train()
        loss = self.passes.train(self._micro_batches(), self.split.times)
        told = torch.stack([loss, loss.new_tensor(stop), loss.new_tensor(saved)])
        dist.all_reduce(told)  # one message for all, so that all ranks leave the loop after the same step
        nats, num_stops, num_saved = told.tolist()
        limit = choice.clip or math.inf
        norm = float(clip_grad_norm_(self.model.parameters(), limit, extra_groups=self.grid.stage_groups))
        if not math.isfinite(nats + norm):
            # Before the update: what a checkpoint holds stays finite, and can be gone on from.
            raise InputError(
                f"step {self.done + 1} has a loss of {nats} nats and a gradient of norm {norm}; "
                "--resume with a lower optimizer.lr"
            )
        rate = learning_rate(self.done, num_steps, choice)
        self._update(rate)
        self._latest.append(time.monotonic() - begun)
        self.seconds += self._latest[-1]
        if not num_steps and len(self._latest) == PLANNED_AFTER:
            self._plan()
        return StepFigures(nats / math.log(2), norm, rate, num_stops > 0, num_saved == self.grid.axes.num_ranks)

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1

    def _plan(self) -> None:
        """Fix the number of steps to what fits into `run.minutes`; rank 0's clock decides for all.

        From here on no clock has a say, and checkpoints know the number, so a resume repeats the run exactly.
        """
        left = 60 * self.config.run.minutes - self.seconds
        steps = on_rank_0(lambda: self.done + max(1, int(left / self.seconds_per_step)))
        self.config = replace(self.config, run=replace(self.config.run, steps=steps))

    def _micro_batches(self) -> Iterator[Batch]:
        """This rank's samples of the batch that comes next. What the batch is depends on no mesh."""
        config, size, share = self.config, self.split.micro_batch, self.split.micro_batch * self.split.times
        first = self.done * config.optimizer.batch + self.grid.data_rank * share
        for at in range(first, first + share, size):
            yield batch(self.text, config.data.context, config.run.seed, at, size)

    def judge(self, num_windows: int | None = None) -> Score:
        """The score of the held-out text, or of about `num_windows` windows spread evenly over it."""
        return judge(self.passes, self.windows, self.split.micro_batch, num_windows)

    def sample(self) -> str:
        """Text after `run.prompt`. All ranks compute it together: a forward gathers every rank's shards."""
        self.model.eval()
        run, draw = self.config.run, Draw(self.config.run.temperature, seed=self.config.run.seed)
        prompt = run.prompt.encode(errors="surrogateescape")
        tokens = continued(self.passes.logits, prompt, run.sample, self.config.data.context, draw, self.device)
        return "".join(readable(tokens))

    @property
    def judged(self) -> str:
        """A digest of what quick evaluations judge: the scores of two runs that agree in it are comparable."""
        what = (self.config.data.context, QUICK_WINDOWS, hashlib.sha256(self.corpus.held_out).hexdigest())
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _optimizer_of(model: nn.Module, choice: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns the optimizer of the config. It decays matrices, and leaves vectors, the norms' scales, alone."""
    matrices = {name: each for name, each in model.named_parameters() if each.ndim > 1}
    vectors = {name: each for name, each in model.named_parameters() if each.ndim <= 1}
    betas = (choice.beta1, choice.beta2)
    if choice.name == "adamw":
        groups = [
            {"params": list(matrices.values()), "weight_decay": choice.weight_decay},
            {"params": list(vectors.values()), "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, lr=choice.lr, betas=betas, fused=True)
        return flatten_optimizer(optimizer) if choice.flatten else optimizer
    left = left_to_adamw(model)
    groups = [
        {"params": [each for each in matrices.items() if not left[each[0]]]},
        {"params": [each for each in matrices.items() if left[each[0]]], "algorithm": "adamw"},
        {"params": list(vectors.items()), "algorithm": "adamw", "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # At this rate a step changes a matrix's elements as much as AdamW's, so one schedule serves both.
    return Muon(
        groups,
        lr=choice.lr,
        weight_decay=choice.weight_decay,
        momentum=choice.momentum,
        adjust_lr_fn="match_rms_adamw",
        adamw={"betas": betas, "weight_decay": choice.weight_decay},
    )


def introduce(trainer: Trainer, out: Path, resumed: Checkpoint | None, report: Silent) -> None:
    """Say what is about to be trained, on what, and from where."""
    corpus, config = trainer.corpus, trainer.config
    num_parameters = sum(math.prod(shape) for shape in shapes(trainer.model).values())
    done = resumed.step if resumed else 0
    report.write("start", step=done, ranks=trainer.grid.axes.num_ranks, config=config.tree(), text=corpus.digest)
    axes = trainer.grid.axes
    ranks = f"{axes.num_ranks} rank{'s' if axes.num_ranks > 1 else ''}"
    mesh = "" if axes == Axes(dp=axes.num_ranks) else f", {axes}"
    report.say(f"model  {num_parameters:,} parameters, sharded over {ranks}{mesh} on {trainer.device}")
    report.say(
        f"text   {corpus.num_documents:,} documents in {corpus.source}: {len(corpus.train):,} bytes "
        f"to train on, {len(corpus.held_out):,} held out"
    )
    batch = f"{config.optimizer.batch} x {config.data.context} bytes"
    steps = f"{config.run.steps:,} steps" if config.run.steps else f"{config.run.minutes:g} minutes of steps"
    report.say(f"run    {steps} of {batch}, in {out}")
    for note in config.notes():
        report.say(f"note   {note}")
    for note in resumed.notes if resumed else ():
        report.say(f"note   {note}; passed over")
    for change in resumed.changes(config) if resumed else ():
        report.say(f"note   {change}; losses will differ from those of the run as it was begun")
    report.begin(done, config.run.steps)


def train(
    trainer: Trainer, out: Path, report: Silent, stop: Callable[[], bool] = lambda: False, trace: int | None = None
) -> bool:
    """Do the steps that are left, saving and judging on the way, and finish. False: stopped before the last.

    Step number `trace`, 0 for the third from here, is recorded in `out`.

    Raises:
        InputError: the loss or its gradient is no longer finite.
        NotSaved: a checkpoint could not be written.
    """
    place = place_in(out, trainer.config.run.checkpoints)
    model, optimizer, begun = trainer.model, trainer.optimizer, trainer.done
    with Saver(place, model, optimizer, trainer.corpus.digest, report, saved=begun) as saver:
        if begun:
            report.say(f"going on after step {begun}")
            if _due(begun, trainer.config.run.eval_every) and not trainer.finished:
                _evaluate(trainer, saver, report)  # it was saved, and may have been stopped before it was judged
        while not trainer.finished:
            make = trainer.step
            if trace is not None and trainer.done + 1 == (
                trace or min(begun + 3, trainer.config.run.steps or begun + 3)
            ):
                make = partial(_recorded, trainer, out, report)
            before, step = trainer.config, make(stop(), saver.is_written)
            for note in trainer.config.notes() if trainer.config is not before else ():
                report.say(f"note   {note}")  # run.minutes is a number of steps now
            if step.saved:
                saver.settle()
            _tell(trainer, step, report)
            if step.stop or _due(trainer.done, trainer.config.run.save_every):
                saver.save(trainer.done, trainer.config)
            if step.stop and not trainer.finished:
                saver.settle()
                report.over()
                report.say(f"stopped after step {trainer.done}, which is saved; --resume goes on from there")
                return False
            if _due(trainer.done, trainer.config.run.eval_every) and not trainer.finished:
                _evaluate(trainer, saver, report)
        if saver.saved < trainer.done:
            saver.save(trainer.done, trainer.config)
        saver.settle()  # whatever comes, nothing of the training is lost
        _finish(trainer, saver, out, report)
    return True


def _recorded(trainer: Trainer, out: Path, report: Silent, stop: bool, saved: bool) -> StepFigures:
    """Make a step, and keep a timeline of it. All ranks record it, or the others would wait for rank 0."""
    from sherd.tools.plan.files import TIMELINE, to_json
    from sherd.tools.plan.tracing import traced

    number, path = trainer.done + 1, out / TIMELINE
    num_ranks = trainer.grid.axes.num_ranks
    title = f"step {number} of {out.name} on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    with traced(trainer.model, trainer.optimizer, title) as trace:
        step = trainer.step(stop, saved)
    on_rank_0(lambda: path.write_text(to_json(trace.timeline), encoding="utf-8"))
    report.say(f"step {number:>6}  recorded in {path}; sherd report {out} shows it")
    return step


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(trainer: Trainer, saver: Saver, report: Silent) -> None:
    """Judge the model on a part of the held-out text, and keep it if it never was better."""
    score = trainer.judge(QUICK_WINDOWS)
    report.write("evaluation", step=trainer.done, bits=score.bits)
    told = f"{score.nats:.3f} nats, {score.bits:.3f} bits per byte"
    report.say(f"step {trainer.done:>6}  held-out {told}, about {QUICK_WINDOWS} windows")
    _keep_if_best(trainer, saver, score)


def _keep_if_best(trainer: Trainer, saver: Saver, score: Score) -> None:
    """Save what no evaluation before was better than, and name it the best."""
    run = trainer.config.run
    if run.keep_best and run.save_every:
        saver.keep_best(Best(trainer.done, score.bits, trainer.judged), trainer.config)


def _tell(trainer: Trainer, step: StepFigures, report: Silent) -> None:
    config, steps = trainer.config, trainer.config.run.steps
    report.step(
        step=trainer.done,
        steps=steps,
        loss=step.loss,
        gradient_norm=step.gradient_norm,
        learning_rate=step.learning_rate,
        tokens_per_second=config.optimizer.batch * config.data.context / trainer.seconds_per_step,
        peak_bytes=peak_memory(trainer.device),
        seconds=trainer.seconds,
        seconds_left=(steps - trainer.done) * trainer.seconds_per_step if steps else None,
    )


def _finish(trainer: Trainer, saver: Saver, out: Path, report: Silent) -> None:
    """Judge the model on all held-out bytes, beside lzma, and let it write."""
    run, num_bytes = trainer.config.run, trainer.windows.num_bytes
    report.say(f"judging the model on all {num_bytes:,} held-out bytes ...")
    # The last step beside the evaluations before it: by as much text as these, or it would not be comparable.
    _keep_if_best(trainer, saver, trainer.judge(QUICK_WINDOWS))
    score, packed = trainer.judge(), lzma_bits(trainer.corpus.held_out)
    report.write("evaluation", step=trainer.done, bits=score.bits, lzma_bits=packed)
    report.say(f"drawing the sample, {run.sample:,} bytes ...")
    sample = trainer.sample()
    report.say(f"\nsample\n------\n{sample}\n------")
    report.say(f"held-out  {score}, over all {num_bytes:,} bytes")
    if packed is None:
        report.say("lzma      is not part of this Python, so there is nothing to compare with")
    else:
        report.say(f"lzma      {packed:.3f} bits per byte, for the same bytes compressed alone (preset 9 extreme)")
    report.finish(sample, packed)
    folder, best = Folder(saver.place), on_rank_0(saver.best)
    better = f"; the best by then is {folder.folder_of(best.step)}" if best and best.step != trainer.done else ""
    report.say(f"model     {folder.folder_of(trainer.done)}{better}")
    report.say(f'try       sherd generate {shlex.quote(str(out))} --prompt "def " --tokens 200')
