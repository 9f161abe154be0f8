"""How long a rank takes to plan a very large optimizer: 100,000 parameters over 4,096 ranks.

    python docs/benchmarks/plan.py

Planning is pure integers and needs no process group, so one process stands for any rank of the 4,096.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from support.machine import command, load, machine, today

from zero_opt.layout import BucketLayout, ParamSpec, plan_flat, plan_whole_params

PARAMS, WORLD_SIZE, BUCKET_BYTES = 100_000, 4_096, 25 * 2**20


def large_model() -> dict[int, ParamSpec]:
    """Mostly matrices of up to 4 M elements, with vectors between them."""
    draw = random.Random(0)
    sizes = [draw.choice([512, 4096, 2**18, 2**20, 2**22]) for _ in range(PARAMS)]
    return {i: ParamSpec(numel, 4, i % 3, "torch.float32", "cpu") for i, numel in enumerate(sizes)}


def seconds(planner: Callable[..., list[BucketLayout]], specs: dict[int, ParamSpec]) -> tuple[float, int, int]:
    """Time for the plan and one rank's slices of it; buckets; slices."""
    begin = time.perf_counter()
    layouts = planner(specs, WORLD_SIZE, BUCKET_BYTES)
    slices = [piece for layout in layouts for piece in layout.slices(WORLD_SIZE // 3)]
    return time.perf_counter() - begin, len(layouts), len(slices)


def main() -> None:
    """Measure, and print one row per planner."""
    specs = large_model()
    print(f"### Planning, {today()}\n\n`{command('docs/benchmarks/plan.py')}`\n\n{machine()}; {load()}.\n")
    print(f"{PARAMS:,} parameters, {sum(s.numel for s in specs.values()):,} elements, {WORLD_SIZE:,} ranks")
    print("| planner           | buckets | slices of one rank | seconds |")
    print("| ----------------- | ------- | ------------------ | ------- |")
    for planner in (plan_flat, plan_whole_params):
        taken, buckets, slices = seconds(planner, specs)
        print(f"| {planner.__name__:<17} | {buckets:7,} | {slices:18,} | {taken:7.2f} |")


if __name__ == "__main__":
    main()
