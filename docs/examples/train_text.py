"""Train a small GPT on English text over two ranks, with sharded gradients and optimizer state, and prove it.

    torchrun --nproc-per-node 2 docs/examples/train_text.py

Reads the reference text of Python's own `help()`, byte by byte. Prints held-out bits per byte beside those of a
byte-bigram model and the bytes each rank holds beside an unsharded run's, draws the loss curve, saves a
checkpoint and resumes it in plain torch.optim.AdamW and at other world sizes, where the next step must be the
same to the bit. The exit code is 0 only if it is, if the model predicts better than bigrams, and if the
gradients held are bounded as promised.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import text_ranks
import torch
from resume_text import compare_next_step, run_at_world_size, save_checkpoint
from text_data import Corpus, bigram_bits_per_byte, bigram_entropy, load_corpus, random_batch
from text_model import GPT, ModelSize, parameter_groups
from text_report import History, Memory, MemoryScan, draw_loss_curve, memory_table
from text_training import add_training_arguments, held_out_bits_per_byte, learning_rate_factor
from tqdm import tqdm

import zero_opt

RESUME_WORLD_SIZES = (1, 3)


@dataclass
class Run:
    """One rank's view of the training run."""

    arguments: argparse.Namespace
    rank: int
    world_size: int
    corpus: Corpus
    model: GPT
    optimizer: zero_opt.ShardedOptimizer

    def say(self, text: str = "") -> None:
        """Print, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_arguments(parser)
    parser.add_argument(
        "--bucket-mb", type=float, default=0.5, help="the library's default would hold all of this small model"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the checkpoint and the picture")
    return parser.parse_args()


def train(run: Run, scan: MemoryScan) -> tuple[History, Memory]:
    """The training loop: that of any torch.optim optimizer, but that `optimizer` clips."""
    steps, batch, context = run.arguments.steps, run.arguments.batch, run.model.size.context
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: learning_rate_factor(step, steps))
    history, memory = History(), Memory(0, 0, 0)
    bar = tqdm(range(1, steps + 1), disable=run.rank != 0, mininterval=1.0, unit="step")
    for step in bar:
        seed = step * run.world_size + run.rank  # every rank and step its own windows
        tokens, targets = random_batch(run.corpus.train, batch, context, seed)
        loss = run.model.loss(tokens, targets)
        loss.backward()
        looked_at = step == min(3, steps)  # the order of the buckets is settled after the first step
        if looked_at:
            early = scan.measure(run.model, run.optimizer, ignore=(tokens, targets, loss))
        run.optimizer.clip_grad_norm_(run.arguments.max_norm)
        if looked_at:
            memory = scan.measure(run.model, run.optimizer, ignore=(tokens, targets, loss))
            memory = replace(memory, gradients_as_backward_returns=early.gradients)
        run.optimizer.step()
        schedule.step()
        run.optimizer.zero_grad()
        history.train_bits.append(loss.item() / math.log(2))
        if step % max(1, steps // 4) == 0 or step == steps:
            history.held_out_bits[step] = held_out_bits_per_byte(
                run.model, run.corpus.held_out, run.rank, run.world_size
            )
        bar.set_postfix(bits_per_byte=f"{history.train_bits[-1]:.3f}")
    return history, memory


def build_run(arguments: argparse.Namespace, corpus: Corpus) -> Run:
    """Everything training needs; the optimizer is the one line that differs from an unsharded run."""
    rank, world_size = text_ranks.start()
    size = ModelSize(arguments.width, arguments.layers, arguments.heads, arguments.context)
    model = GPT(size, seed=rank)
    zero_opt.broadcast_params(model, src=0)
    optimizer = zero_opt.ShardedOptimizer(
        parameter_groups(model),
        torch.optim.AdamW,
        lr=arguments.lr,
        betas=(0.9, 0.95),
        reduction=zero_opt.Overlapped(bucket_mb=arguments.bucket_mb),
    )
    return Run(arguments, rank, world_size, corpus, model, optimizer)


def describe(run: Run) -> None:
    """What is about to be trained, and on what."""
    count = sum(p.numel() for p in run.model.parameters())
    run.say(
        f"text: {len(run.corpus.train):,} bytes to train on, {len(run.corpus.held_out):,} held out\n"
        f"model: {count:,} parameters; {run.world_size} ranks x {run.arguments.batch} windows of "
        f"{run.model.size.context} bytes"
    )


def save_and_resume(run: Run) -> tuple[bool, Memory]:
    """Save what rank 0 consolidates, then take the next step here, in plain AdamW and at other world sizes."""
    path = run.arguments.out / "checkpoint.pt"
    begin = time.perf_counter()
    run.optimizer.consolidate_state_dict(to=0)
    seconds = time.perf_counter() - begin
    if run.rank == 0:
        save_checkpoint(path, run.model, run.optimizer.state_dict(), asdict(run.model.size))
    text_ranks.barrier()
    run.say(f"\nconsolidated in {seconds * 1000:.0f} ms, saved {path}; the next step beside plain torch.optim.AdamW's:")
    checkpoint = torch.load(path, weights_only=True)
    comparison = compare_next_step(run.model, run.optimizer, checkpoint, run.corpus.train)
    run.say(f"went on at world size {run.world_size}: {comparison}")
    same = comparison.differing == 0
    if run.rank == 0:
        for world_size in RESUME_WORLD_SIZES:
            resumed_same, line = run_at_world_size(world_size, path)
            run.say(line)
            same = same and resumed_same
    failures = text_ranks.add_up([float(not same)])[0]
    return failures == 0, comparison.plain_memory


def gather_memory(memory: Memory) -> list[Memory]:
    """Every rank's bytes."""
    rows = text_ranks.gather(torch.tensor(astuple(memory)))
    return [Memory(*(int(x) for x in row)) for row in rows]


def gradient_bound(run: Run) -> int:
    """Bytes of a rank's shard of the gradients, under 1 % of padding, and of two buckets."""
    sizes = [p.numel() * p.element_size() for p in run.model.parameters()]
    bucket = max(int(run.arguments.bucket_mb * 2**20), *sizes)
    return int(sum(sizes) / run.world_size * 1.01) + 2 * bucket


def judge(run: Run, history: History, memory: list[Memory], same: bool) -> bool:
    """Say what came out, and whether all of it is as promised."""
    bits = history.held_out_bits[run.arguments.steps]
    bigram = bigram_bits_per_byte(run.corpus.train, run.corpus.held_out)
    floor = bigram_entropy(run.corpus.held_out)
    held, bound = max(m.gradients for m in memory), gradient_bound(run)
    better, bounded = bits < min(bigram, floor), held <= bound
    run.say(
        f"\nheld-out bits per byte: {bits:.3f}, {'BELOW' if better else 'NOT below'} those of byte bigrams:\n"
        f"    {bigram:.3f} by counts of the training text, backed off to byte frequencies\n"
        f"    {floor:.3f} by counts of the held-out text itself\n"
        f"gradients as the step begins: {held:,} bytes, {'WITHIN' if bounded else 'NOT within'} the shard and two "
        f"buckets, {bound:,}\n"
        f"next steps: {'the SAME to the bit' if same else 'NOT the same'} as plain torch.optim.AdamW's"
    )
    if run.rank == 0:
        draw_loss_curve(history, bigram, run.arguments.out / "loss.png")
    return better and bounded and same


def main() -> int:
    """Train, resume, show; 0 if the model beat the bigrams and every resumed step was the same to the bit."""
    begin = time.perf_counter()
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus()
    scan = MemoryScan()
    run = build_run(arguments, corpus)
    describe(run)
    history, memory = train(run, scan)
    trained = time.perf_counter() - begin
    same, plain_memory = save_and_resume(run)
    ranks_memory = gather_memory(memory)
    run.say("\n" + memory_table(plain_memory, ranks_memory))
    good = judge(run, history, ranks_memory, same)
    total = time.perf_counter() - begin
    run.say(f"loss curve: {arguments.out / 'loss.png'}; {trained:.0f} s to train, {total:.0f} s in all")
    run.optimizer.close()
    text_ranks.stop()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
