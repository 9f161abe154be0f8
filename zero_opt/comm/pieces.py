"""Buckets that are reduced by messages, several at a time: large ones in pieces, each in a lane with its own staging.

The lanes bound the bytes under way, whatever sizes buckets have. A piece has the same part of every rank's shard, so
that each rank owns a part of it, as of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from ..layout import ALIGN, Span
from ..system.stages import CallStages, Lane, Pieces
from .exchange import BucketReduction, Flow, Run, run_spans_within

# Pieces have as many bytes as buckets are planned to have, within these bounds. A piece costs up to a millisecond of
# processor time besides its bytes; small ones leave earlier, and more of them are under way.
_SMALLEST, _LARGEST = Flow().piece_bytes, 25 << 20
# Bytes that may be under way at a time.
_UNDER_WAY = Flow().piece_bytes * Flow().lanes
_LEAST_MESSAGE_BYTES = 64 << 10
# So many buckets that are in pieces are under way at a time, in lanes that have what staging is not cut.
LARGE_LANES = 2
# The use of lanes.
REDUCTION = "reduction"
# An exchange's pieces are named by its sequence and their number, of which there are fewer than this.
_MOST_PIECES = 1 << 20


def flow_of(bucket_mb: float) -> Flow:
    """Return how buckets travel that are planned to have so many MiB each."""
    piece_bytes = int(min(max(bucket_mb * 2**20, _SMALLEST), _LARGEST))
    return Flow(piece_bytes, max(_UNDER_WAY // piece_bytes, LARGE_LANES))


def _cut(bounds: Sequence[int], itemsize: int, flow: Flow) -> tuple[int, int]:
    """Return in how many pieces a bucket is reduced, and how many elements of each rank's shard one has at the most."""
    largest = max([stop - start for start, stop in pairwise(bounds)])
    most = max(flow.piece_bytes // (len(bounds) - 1), _LEAST_MESSAGE_BYTES) // itemsize
    if largest <= most:
        return 1, largest
    numel = -(-largest // (-(-largest // most) * ALIGN)) * ALIGN  # pieces of about the same size
    return -(-largest // numel), numel


def count_pieces(bounds: Sequence[int], itemsize: int, flow: Flow) -> int:
    """Return in how many pieces a bucket is reduced."""
    return _cut(bounds, itemsize, flow)[0]


def lane_of(bucket: int, first_piece: int, pieces: int, flow: Flow) -> int:
    """Return the lane of a bucket's reductions.

    Args:
        bucket: its index. first_piece: how many pieces the buckets before it have. pieces: how many it has.
    """
    return first_piece % flow.lanes if pieces == 1 else flow.lanes + bucket % LARGE_LANES


def in_pieces(
    reduction: BucketReduction, rank: int, reduce: Callable[[BucketReduction], CallStages[bool]]
) -> CallStages[bool]:
    """Reduce a bucket in pieces, of which most buckets are one.

    Args:
        rank: this rank. reduce: reduces a piece.
    """
    pieces = list(_pieces_of(reduction, rank))
    if len(pieces) == 1:
        return (yield from reduce(pieces[0]))
    ended = yield Pieces([(Lane(REDUCTION, piece.lane), _without_grad(reduce(piece))) for piece in pieces])
    complete: list[bool] = [future.result(0) for future in ended]
    return all(complete)


def _pieces_of(reduction: BucketReduction, rank: int) -> Iterator[BucketReduction]:
    """Cut a bucket, which has no sums; pieces have idents and lanes of their own."""
    ident, runs, bounds, out, _, lane, flow = reduction
    (count, numel), own = _cut(bounds, out.element_size(), flow), bounds[rank + 1] - bounds[rank]
    for number in range(count):
        name, turn = ident._replace(sequence=ident.sequence * _MOST_PIECES + number), (lane + number) % flow.lanes
        if count == 1:
            yield reduction._replace(ident=name, lane=turn)
            return
        low, high = number * numel, (number + 1) * numel
        spans = [Span(min(start + low, stop), min(start + high, stop)) for start, stop in pairwise(bounds)]
        at = list(accumulate([span.numel for span in spans], initial=0))
        within = [run for span, begin in zip(spans, at, strict=False) for run in _runs_within(runs, span, begin)]
        part = out[min(low, own) : min(high, own)]
        yield reduction._replace(ident=name, runs=within, bounds=at, out=part, lane=turn)


def _runs_within(runs: Sequence[Run], span: Span, at: int) -> Iterator[Run]:
    """Yield the runs' elements within a span of the bucket, as a run of a piece in which the span begins ``at``."""
    for run, (low, high) in run_spans_within(runs, span):
        values = None if run.values is None else run.values[low - run.start : high - run.start]
        yield Run(at + low - span.start, high - low, values, run.add)


def _without_grad(stages: CallStages[bool]) -> CallStages[bool]:
    """Run stages without autograd, which each thread has on its own."""
    while True:
        with torch.no_grad():
            try:
                pause = next(stages)
            except StopIteration as over:
                complete: bool = over.value
                return complete
        yield pause
