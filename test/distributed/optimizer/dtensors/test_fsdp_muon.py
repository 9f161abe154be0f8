"""``torch.optim.Muon`` over matrices that ``fully_shard`` has cut into parts of different sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zero_opt
from test.support.fsdp_models import local_state, locals_of, mesh_of
from test.support.harness import assert_bitwise, run_processes
from zero_opt.errors import UnsupportedParam

STEPS = 3
# Seven rows are 4 and 3, or 3, 3 and 1; four are 2 and 2, or 2, 2 and none.
ROWS, COLUMNS = (7, 4), 9
# By ranks: what each row of a gradient has in one column, in no two rows the same. The norm of every rank's part is a
# whole number, and so is that of all. So no sum over ranks rounds, in any order, nor does one within a product.
ENTRIES = {2: ((2, 2, 2, -2, 2, -2, 1), (3, 0, 4, 0)), 3: ((2, 0, 0, 2, -2, 1, 6), (3, 0, -4, 0))}


class Matrices(nn.Module):
    """One matrix per number of rows, with the same values on every rank."""

    def __init__(self, rows: tuple[int, ...] = ROWS) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        values = (torch.randn(count, COLUMNS, generator=generator) for count in rows)
        self.matrices = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self, grads: list[Tensor]) -> Tensor:
        """The gradient of what this returns is ``grads``."""
        products = [(matrix * grad).sum() for matrix, grad in zip(self.matrices, grads, strict=True)]
        return torch.stack(products).sum()


def cut(world_size: int, rows: tuple[int, ...] = ROWS) -> Matrices:
    return fully_shard(Matrices(rows), mesh=mesh_of((world_size,)))  # type: ignore[return-value]


def exact_grads(world_size: int) -> list[Tensor]:
    """Gradients of which every sum that a step takes is exact."""
    found = []
    for entries in ENTRIES[world_size]:
        grad = torch.zeros(len(entries), COLUMNS)
        columns = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(4))[: len(entries)]
        grad[torch.arange(len(entries)), columns] = torch.tensor(entries, dtype=torch.float32)
        found.append(grad)
    return found


def _exact(rank: int, world_size: int) -> None:
    """Nesterov's update has no more bits than bf16 keeps: momentum is a half, and each step has the same gradient."""
    whole, model, mean = Matrices(), cut(world_size), exact_grads(world_size)
    options: Any = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.5}
    plain = torch.optim.Muon(whole.parameters(), **options)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Muon, **options)
    shares = torch.linspace(0.5, 1.5, world_size)  # whose mean is 1
    for _ in range(STEPS):
        model([grad * shares[rank] for grad in mean]).backward()
        for matrix, param, grad in zip(whole.matrices, model.matrices, mean, strict=True):
            matrix.grad = grad.clone()
            assert_bitwise(param.grad.full_tensor(), grad)
        plain.step()
        optimizer.step()
        optimizer.zero_grad()
        assert_bitwise([param.full_tensor() for param in model.parameters()], list(whole.parameters()))
        full = [optimizer.state[param]["momentum_buffer"].full_tensor() for param in model.parameters()]
        assert_bitwise(full, [plain.state[matrix]["momentum_buffer"] for matrix in whole.parameters()])


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_parts_are_stepped_as_the_whole_matrix_where_no_sum_rounds(world_size: int) -> None:
    run_processes(world_size, _exact)


def _rounded(rank: int, world_size: int) -> None:
    """Sums over ranks round as torch has them, whatever calls the class."""
    found = []
    for make in (torch.optim.Muon, partial(zero_opt.ShardedOptimizer, optimizer_class=torch.optim.Muon)):
        model = cut(world_size)
        optimizer = make(model.parameters(), lr=0.02)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            model([torch.randn(rows, COLUMNS, generator=generator) for rows in ROWS]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([locals_of(model.parameters()), local_state(optimizer)])
    assert_bitwise(found[1], found[0])


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_parts_have_the_bits_of_torch_over_the_same_parts(world_size: int) -> None:
    run_processes(world_size, _rounded)


def _narrow(rank: int, world_size: int) -> None:
    """A matrix of a row less than there are ranks. Without the refusal, torch raises once it has changed others."""
    rows = world_size - 1
    model = cut(world_size, (rows, world_size))
    narrow, other = model.parameters()
    said = f"of shape .{rows}, {COLUMNS}., is cut by dimension 0, of length {rows}, for {world_size}"
    with pytest.raises(UnsupportedParam, match=f"{said} ranks.* another optimizer, such as torch.optim.AdamW"):
        zero_opt.ShardedOptimizer([other, narrow], torch.optim.Muon)
    optimizer = zero_opt.ShardedOptimizer([other], torch.optim.Muon, lr=0.1)
    with pytest.raises(UnsupportedParam, match=said):
        optimizer.add_param_group({"params": [narrow]})
    adam = zero_opt.ShardedOptimizer([narrow], torch.optim.AdamW, lr=0.1)
    before = locals_of([narrow, other])
    model([torch.ones(count, COLUMNS) for count in (rows, world_size)]).backward()
    optimizer.step()
    adam.step()
    after = locals_of([narrow, other])
    assert all(not torch.equal(new, old) for new, old in zip(after, before, strict=True) if old.numel())
    narrow.requires_grad_(False)
    zero_opt.ShardedOptimizer([narrow, other], torch.optim.Muon).close()
    narrow.requires_grad_(True)
    with pytest.raises(RuntimeError, match="placement"):
        torch.optim.Muon([other, narrow]).step()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_matrix_of_fewer_rows_than_ranks_is_refused_with_the_way_out(world_size: int) -> None:
    run_processes(world_size, _narrow)
