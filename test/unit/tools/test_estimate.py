"""What the estimate takes, and what it says; ``test/distributed/tools`` compares it with what ranks hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zero_opt
from test.support.wrapper_tensor import wrapped
from zero_opt import ConfigConflict, ConfigError, ConfigTypeError, UnsupportedOptimizer, UnsupportedParam, estimate
from zero_opt.placement.in_process.host_offload import HostUnits, InHost
from zero_opt.placement.in_process.units import Mastered, Unit
from zero_opt.placement.worker import policy as worker_policy
from zero_opt.tools.dry_run import Sketch, sketch_of
from zero_opt.tools.estimate import KINDS, Estimate


def linears(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(300, 200, **options), nn.Linear(200, 64, **options))


def test_a_table_by_kind_and_place() -> None:
    found = estimate(linears(device="meta"), 2, offload=zero_opt.WorkerOffload(threads=1), device="cuda")
    lines = str(found).splitlines()
    assert lines[0].startswith("AdamW, 73,064 elements of float32 on cuda; WorkerOffload(")
    assert lines[1] == "rank 0 of 2, in MiB" and lines[2].split() == ["device", "host", "nvme"]
    kinds = [line.split()[0] for line in lines[3:]]
    assert kinds == sorted(kinds, key=[*KINDS, "total"].index)
    assert {len(line) for line in lines[2:]} == {len(lines[2])}
    total = lines[-1].split()
    expected = [f"{nbytes / 2**20:,.2f}" for nbytes in (found.device_bytes, found.host_bytes)]
    assert total == ["total", *expected, "-"] and found.nvme_bytes == 0
    assert found.device_bytes + found.host_bytes == found.nbytes() == sum(row.nbytes for row in found.rows)
    assert found.nbytes("state", "device") == 0 < found.nbytes("state", "host")


@pytest.mark.parametrize("asked", [{"kind": "bogus"}, {"where": "cpu"}])
def test_kinds_and_places_that_there_are_not_are_refused(asked: dict[str, str]) -> None:
    name, value = next(iter(asked.items()))
    with pytest.raises(ConfigError, match=f"{name} must be one of .*'{value}'"):
        estimate(linears(device="meta"), 2, device="cuda").nbytes(**asked)


def test_a_number_is_like_as_many_elements_in_full_buckets() -> None:
    each = 25 * 2**20 // 2
    params = [torch.empty(each, dtype=torch.bfloat16, device="meta").requires_grad_() for _ in range(3)]
    params.append(torch.empty(1000, dtype=torch.bfloat16, device="meta").requires_grad_())
    number = estimate(3 * each + 1000, 4, param_dtype=torch.bfloat16, device="cuda")
    assert number.rows == estimate(params, 4, device="cuda").rows
    assert number.nbytes("params") == 2 * (3 * each + 1000)


def test_gradients_of_many_buckets_that_are_alike_all_count() -> None:
    numel = 100 * 25 * 2**20 // 2  # of 100 buckets
    found = estimate(numel, 1, offload=zero_opt.CPUOffload(), param_dtype=torch.bfloat16, device="cuda")
    assert found.nbytes("grad_shards", "device") == 2 * numel


def test_where_the_model_is_does_not_matter() -> None:
    real, meta = linears(), linears(device="meta")
    assert estimate(real, 3).rows == estimate(meta, 3, device="cpu").rows
    halves = estimate(real, 3, param_dtype=torch.bfloat16)
    assert halves.rows == estimate(linears(dtype=torch.bfloat16), 3).rows
    with torch.device("meta"):
        assert estimate(real, 2).on_rank(1).rows == estimate(real, 2, device="cpu").on_rank(1).rows


def test_groups_with_options_of_their_own() -> None:
    first, second = (torch.empty(6400, device="meta").requires_grad_() for _ in range(2))
    groups = [{"params": [("first", first)]}, {"params": [("second", second)], "amsgrad": True}]
    apart = zero_opt.Overlapped(bucket_mb=0.02)  # each group in a bucket of its own, which both ranks share
    found = estimate(groups, 2, torch.optim.Adam, reduction=apart)
    kept = {row.name: row.nbytes for row in found.rows if row.kind == "state"}
    assert kept["exp_avg"] == 2 * 4 * 3200 and kept["max_exp_avg_sq"] == 4 * 3200


def test_frozen_parameters_are_there_but_have_neither_gradients_nor_state() -> None:
    model = linears()
    whole = estimate(model, 2)
    model[0].requires_grad_(False)
    part = estimate(model, 2)
    assert part.nbytes("params") == whole.nbytes("params")
    assert part.nbytes("state") == estimate(model[1], 2).nbytes("state") < whole.nbytes("state")
    model.requires_grad_(False)
    assert estimate(model, 2).nbytes("state") == estimate(model, 1).nbytes("state") == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_a_frozen_parameter_may_have_a_dtype_that_cannot_be_trained(dtype: torch.dtype) -> None:
    plain = nn.Linear(3, 3)
    frozen = nn.Parameter(torch.zeros(2, 3, dtype=dtype), requires_grad=False)
    found, without = estimate([frozen, *plain.parameters()], 2), estimate(plain, 2)
    assert found.nbytes("params") == without.nbytes("params") + 6
    assert found.nbytes("state") == without.nbytes("state")


def test_a_frozen_parameter_may_wrap_others_and_those_of_a_fake_mode_may_train() -> None:
    frozen, plain = nn.Parameter(wrapped(2, 3), requires_grad=False), nn.Linear(3, 3)
    shaped = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    assert estimate([frozen, *plain.parameters()], 2).rows == estimate([shaped, *plain.parameters()], 2).rows
    with FakeTensorMode():
        fake = nn.Linear(3, 3)
    assert estimate(fake, 2).rows == estimate(plain, 2).rows


def test_compact_state_of_the_native_class_alone() -> None:
    forms = {"float32": 8.0, "bfloat16": 4.0, "block8": 2 + 4 / 64}
    for moments, each in forms.items():
        found = estimate(1 << 20, 1, zero_opt.CPUAdamW, device="cpu", state=zero_opt.AdamState(moments))
        step = 4
        assert found.nbytes("state") == each * (1 << 20) + step


def test_a_frozen_parameter_may_be_what_the_native_class_does_not_step() -> None:
    params = [torch.zeros(8, requires_grad=True), torch.zeros(8, dtype=torch.float64)]
    assert estimate(params, 2, zero_opt.CPUAdamW).nbytes("state") > 0
    with pytest.raises(UnsupportedParam, match=r"parameter 1 must be .*, got torch\.float64"):
        estimate([param.requires_grad_() for param in params], 2, zero_opt.CPUAdamW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_cross_to_a_worker_in_their_own_dtype(dtype: torch.dtype) -> None:
    found = estimate(1000, 1, offload=zero_opt.WorkerOffload(), param_dtype=dtype, device="cuda", fused=True)
    assert [row.nbytes for row in found.rows if row.name == "copies of gradients"] == [1000 * dtype.itemsize]


def test_layouts_with_gaps_have_copies() -> None:
    param = nn.Parameter(torch.zeros(100, 64)[:, :32])
    rows = estimate([param], 2).rows
    assert [row.nbytes for row in rows if row.name == "copies without gaps"] == [100 * 32 * 4]
    assert estimate([param.detach().clone().requires_grad_()], 2).nbytes("buffers") == 0


def test_ranks_share_memory_with_those_of_their_host_and_fewer_share_cores() -> None:
    one, several, uneven, alone = (estimate(linears(), 4).on_hosts_of(n) for n in (4, 2, 3, 1))
    backend = estimate(linears(), 4, reduction=zero_opt.Overlapped(exchange="backend"))
    assert alone.rows == uneven.rows == backend.rows
    # In two stages: a page and two slots of shared memory per rank, and fewer shards in buffers. In one, another shard
    # has room in that of the gradients.
    flat = backend.nbytes("staging") + backend.nbytes("grad_shards")
    assert one.nbytes("staging") < several.nbytes("staging") < one.nbytes("staging") + flat
    assert (one.ranks_per_host, several.ranks_per_host) == (4, 2)
    assert (estimate(linears(), 8).ranks_per_host, estimate(linears(), 9).ranks_per_host) == (8, 8)
    assert estimate(linears(), 8).rows == estimate(linears(), 8).on_hosts_of(100).rows
    assert estimate(linears(), 2).on_hosts_of(100).ranks_per_host == 2
    for number, error in ((0, ConfigError), (2.0, ConfigTypeError)):
        with pytest.raises(error, match="ranks_per_host"):
            one.on_hosts_of(number)  # type: ignore[arg-type]
    assert one.on_hosts_of(np.int64(2)).rows == one.on_mesh_of(np.int64(2)).rows == several.rows  # type: ignore[arg-type]
    assert several.on_rank(3).on_hosts_of(4).rows == one.on_rank(3).rows
    assert "rank 0 of 1024, 8 to a host, in KiB" in str(estimate(linears(), 1024))


@pytest.mark.parametrize(
    ("numel", "unit", "size"), [(1000, "KiB", 2**10), (10**6, "MiB", 2**20), (10**9, "GiB", 2**30)]
)
def test_the_unit_suits_the_total(numel: int, unit: str, size: int) -> None:
    found = estimate(numel, 1)
    _, heading, *_, total = str(found).splitlines()
    assert heading.endswith(f"in {unit}")
    assert total.split() == ["total", f"{found.device_bytes / size:,.2f}", "-", "-"]


def test_two_stages_have_two_communicators_and_a_bucket_in_the_order_of_places() -> None:
    model, given = [torch.empty(6400, device="meta").requires_grad_()], {"device": "cuda", "fused": True}
    flat, staged = estimate(model, 4, **given).on_hosts_of(2), estimate(model, 4, **given).on_mesh_of(2)
    assert staged.ranks_per_host == 2
    assert staged.nbytes("communicator") == 2 * flat.nbytes("communicator") > 0
    assert staged.nbytes("grads") - flat.nbytes("grads") == 6400 * 4 + 6400 * 4 // 2
    assert staged.on_rank(3).rows == staged.rows and staged.on_hosts_of(2).rows == flat.rows
    for same in (1, 4):  # one rank per host, one host: see the exchange
        assert estimate(model, 4, **given).on_mesh_of(same).rows == estimate(model, 4, **given).on_hosts_of(same).rows
    with pytest.raises(ConfigError, match="4 ranks, 3 to a host"):
        flat.on_mesh_of(3)


def test_two_stages_of_reduced_gradients_or_of_whole_parameters_stage_no_more() -> None:
    model = [torch.empty(80, 80, device="meta").requires_grad_()]
    for cls, reduction in ((torch.optim.AdamW, zero_opt.AlreadyReduced()), (torch.optim.Muon, zero_opt.Overlapped())):
        flat = estimate(model, 4, cls, reduction=reduction, device="cuda").on_hosts_of(2)
        staged = flat.on_mesh_of(2)
        assert staged.nbytes() - flat.nbytes() == flat.nbytes("communicator")


def test_on_the_cpu_a_mesh_changes_nothing() -> None:
    assert estimate(linears(), 4).on_mesh_of(2).rows == estimate(linears(), 4).on_hosts_of(2).rows


@pytest.mark.parametrize("selective", [None, zero_opt.Selective()])
def test_a_worker_has_its_share_of_its_hosts_cores(selective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(worker_policy, "allowed_threads", lambda usable: usable)
    given: dict[str, Any] = {"device": "cuda", "offload": zero_opt.WorkerOffload(selective=selective)}
    areas = [
        next(row.nbytes for row in estimate(linears(), 64, **given).on_hosts_of(n).rows if row.name == "control area")
        for n in (1, 2, 4, 8, 16, 64)
    ]
    assert areas[0] > areas[1] > areas[2] > areas[3] > areas[4] == areas[5]


def test_ranks_that_differ() -> None:
    params = [torch.empty(n, device="meta").requires_grad_() for n in (100_000, 1000)]
    found = estimate(params, 3, torch.optim.Adafactor, device="cpu")
    assert found.rank == 0
    sizes = [found.on_rank(rank).nbytes("state") for rank in range(3)]
    assert sizes == [400_004, 4004, 0]
    for rank in (3, -1):
        with pytest.raises(ConfigError, match="0 to 2"):
            found.on_rank(rank)


class Lion(torch.optim.Optimizer):
    """Another's class, which wants values in its step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("momentum", torch.zeros_like(param, dtype=torch.bfloat16))
                param.add_(self.state[param]["momentum"].sign(), alpha=-group["lr"] * float(param.sum() + 1))


class Stubborn(Lion):
    """One that is not to be tried."""

    def step(self, closure: Any = None) -> None:
        raise ArithmeticError("not today")


def test_classes_of_others() -> None:
    big = [torch.empty(300, 200, device="meta").requires_grad_()]
    assert estimate(big, 1, Lion).nbytes("state") == 300 * 200 * 2
    assert estimate(big, 2, Lion).nbytes("state") == 300 * 200 * 2
    with pytest.raises(UnsupportedOptimizer, match=r"Stubborn.*not today"):
        estimate(big, 2, Stubborn)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((-1, 2), {}, ConfigError, "whole number"),
        ((2.5, 2), {}, ConfigError, "whole number"),
        ((float("inf"), 2), {}, ConfigError, "whole number"),
        ((10**400, 2), {}, ConfigError, "whole number"),
        ((True, 2), {}, ConfigError, "whole number"),
        ((100, 0), {}, ConfigError, "world_size"),
        ((100, 10**9), {}, ConfigError, "world_size must be at most 65536"),
        ((100, 2.0), {}, ConfigTypeError, "world_size"),
        ((100, True), {}, ConfigTypeError, "world_size"),
        (("7e9", 2), {}, ConfigTypeError, "number"),
        ((None, 2), {}, ConfigTypeError, "number"),
        (([], 2), {}, ConfigError, "empty"),
        (([1, 2], 2), {}, ConfigTypeError, "tensor"),
        ((100, 2, "AdamW"), {}, ConfigTypeError, "optimizer_class"),
        ((100, 2, torch.optim.Adafactor), {}, ConfigError, "shapes"),
        (([torch.zeros(3)], 2, torch.optim.LBFGS), {}, UnsupportedOptimizer, "LBFGS"),
        (([torch.zeros(3, requires_grad=True)], 1, torch.optim.LBFGS), {}, UnsupportedOptimizer, "LBFGS"),
        ((100, 2), {"lr": -1.0}, ConfigError, "lr|learning"),
        ((100, 2), {"nothing": 1}, ConfigTypeError, "nothing"),
        ((100, 1), {"fused": True, "foreach": True}, ConfigConflict, "fused"),
        (
            ([torch.zeros(3, dtype=torch.complex64, requires_grad=True)], 1),
            {"fused": True},
            ConfigConflict,
            "parameter 0 .*complex64",
        ),
        (
            ([torch.zeros(3, dtype=torch.complex64, requires_grad=True)], 2),
            {"fused": True},
            ConfigConflict,
            "parameter 0 .*complex64",
        ),
        ((100, 2), {"capturable": True}, UnsupportedOptimizer, "capturable"),
        ((100, 2), {"offload": "cpu"}, ConfigTypeError, "offload"),
        ((100, 2), {"reduction": zero_opt.AtStep}, ConfigTypeError, "reduction"),
        ((100, 2), {"precision": torch.bfloat16}, ConfigTypeError, "precision"),
        ((100, 2), {"param_dtype": "bfloat16"}, ConfigTypeError, "param_dtype"),
        ((100, 2), {"param_dtype": torch.int32}, ConfigError, "param_dtype"),
        ((100, 2), {"device": "moon"}, ConfigError, "device"),
        ((100, 2), {"device": "meta"}, ConfigError, "device"),
        ((100, 2, torch.optim.RMSprop), {"offload": zero_opt.WorkerOffload()}, UnsupportedOptimizer, "RMSprop"),
        (
            ([torch.zeros(3, dtype=torch.float64, requires_grad=True)], 1),
            {"offload": zero_opt.WorkerOffload()},
            UnsupportedParam,
            "float64",
        ),
        (
            (100, 2),
            {"offload": zero_opt.WorkerOffload(speculate=True), "reduction": zero_opt.AtStep()},
            ConfigConflict,
            "does at step",
        ),
        (([torch.zeros(3).expand(2, 3)], 2), {}, UnsupportedParam, "share memory"),
        ((nn.LazyLinear(3), 2), {}, UnsupportedParam, "initialized"),
        (([nn.Parameter(wrapped(2, 3))], 2), {}, UnsupportedParam, "parameter 0 is a WrapperTensor without memory"),
    ],
)
def test_nonsense(arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        estimate(*arguments, **options)


def test_a_sketch_has_no_values() -> None:
    param = torch.ones(4, 6).t()
    found = sketch_of(param, 1, torch.device("cpu"), "it")
    assert isinstance(found, Sketch) and found.flat.param.is_meta and found.group == 1
    assert found.flat.strides == (1, 6) and isinstance(found.flat.param, Tensor)


SHAPES = ((300, 41), (65,), (3, 5), (20_000,), (70, 70), (30_000,), (1,))


@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "split"), (torch.float16, None)],
)
@pytest.mark.parametrize("ratio", [1.0, 0.6])
def test_what_leaves_an_accelerator(ratio: float, dtype: torch.dtype, master: str | None) -> None:
    """Units as the placement makes them; what is on the meta device plays the accelerator."""
    offload = zero_opt.CPUOffload(ratio=ratio, subgroup_mb=0.05, pin_memory=False)
    params = [torch.empty(shape, dtype=dtype, device="meta").requires_grad_() for shape in SHAPES]
    reduction, precision = zero_opt.Overlapped(bucket_mb=0.1), zero_opt.MixedPrecision(master)
    found = estimate(params, 2, reduction=reduction, offload=offload, precision=precision, fused=True, device="cuda")
    staying = 0
    for rank in range(2):
        maker = HostUnits(offload, zero_opt.AdamState(master=master or "float32"))
        units = [unit for made in maker(found._sizing.buckets(rank)) for unit in made]
        staying += compare_units(found.on_rank(rank), units, dtype, split=master == "split")
        compare_locked(found.on_rank(rank), maker, [unit for unit in units if isinstance(unit, InHost)], dtype)
    assert (staying > 0) == (ratio < 1)


def compare_units(found: Estimate, units: Sequence[Unit], dtype: torch.dtype, *, split: bool) -> int:
    """See that the units' tensors are what was estimated; the elements that stay on the device."""
    told = {(row.name, row.where): row.nbytes for row in found.rows}
    away = [unit for unit in units if isinstance(unit, InHost)]
    copies = sum(t.numel() * t.element_size() for unit in away for t in unit._results)
    numel = sum(t.numel() for unit in away for t in unit.stepped)
    masters = numel * 2 if split else sum(t.numel() * t.element_size() for unit in away for t in unit.stepped)
    assert found.nbytes("masters", "host") == masters
    assert told.get(("copies of parameters", "host"), 0) == (0 if dtype is torch.float32 else copies)
    assert told["exp_avg", "host"] == 4 * numel
    masters = sum(t.numel() * 4 for unit in units if type(unit) is Mastered for t in unit.stepped)
    assert found.nbytes("masters", "device") == masters
    staying = sum(t.numel() for unit in units if not isinstance(unit, InHost) for t in unit.stepped)
    assert told.get(("exp_avg", "device"), 0) == 4 * staying
    return staying


def compare_locked(found: Estimate, maker: HostUnits, away: Sequence[InHost], dtype: torch.dtype) -> None:
    """See that page-locked memory is what was estimated, to the byte."""
    told = {(row.name, row.where): row.nbytes for row in found.rows}
    results = sum(t.numel() * dtype.itemsize for unit in away for t in unit._results)
    assert maker.spare_nbytes == results + told["padding", "host"]
    link, taken = away[0]._link, []
    for unit in away:  # one ahead of what is stepped
        taken.append(link.take(sum(-(-t.numel() * dtype.itemsize // 64) * 64 for t in unit._results)))
        if len(taken) > 1:
            link.give_back(taken[-2])
    link.give_back(taken[-1])
    assert maker.staging_nbytes == told["gradients on their way", "host"]
