"""load_state_dict: what fits is loaded, what does not is refused, or starts afresh (strict=False)."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.masked import masked_tensor

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import values
from test.support.wrapper_tensor import wrapped

SHAPES = ((40, 6), (40,), (3, 40))


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(values(3, 0, 0, i, shape).clone()) for i, shape in enumerate(SHAPES)]


def _fill(params: list[nn.Parameter]) -> None:
    for index, param in enumerate(params):
        param.grad = values(4, 0, 0, index, tuple(param.shape)).clone()


def _saved() -> dict[str, Any]:
    params = _params()
    plain = torch.optim.Adam(params, lr=0.5)
    _fill(params)
    plain.step()
    return plain.state_dict()


def _spoiled() -> dict[str, Any]:
    """Parameter 1 does not fit, there is state of one that is not there, and ``betas`` are missing."""
    saved = copy.deepcopy(_saved())
    saved["state"][1]["exp_avg"] = torch.zeros(7)
    saved["state"][8] = saved["state"][0]
    del saved["param_groups"][0]["betas"]
    return saved


def _expected() -> dict[str, Any]:
    params = _params()
    plain = torch.optim.Adam(params, lr=0.5, betas=(0.5, 0.6))
    saved = _saved()
    del saved["state"][1]
    saved["param_groups"][0]["betas"] = (0.5, 0.6)
    plain.load_state_dict(saved)
    _fill(params)
    plain.step()
    return {"params": [param.detach() for param in params], "state": plain.state_dict()}


def _load(rank: int, world_size: int) -> dict[str, Any]:
    params = _params()
    opt = zero_opt.ShardedOptimizer(params, torch.optim.Adam, lr=0.1, betas=(0.5, 0.6), reduction=zero_opt.AtStep())
    spoiled = _spoiled()
    with pytest.raises(zero_opt.StateDictError):
        opt.load_state_dict(spoiled)
    assert opt.param_groups[0]["lr"] == 0.1
    opt.load_state_dict(spoiled, strict=False)
    assert_bitwise(spoiled, _spoiled())
    _fill(params)
    opt.step()
    opt.consolidate_state_dict()
    found = {"params": [param.detach() for param in params], "state": opt.state_dict() if rank == 0 else None}
    opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_fits_is_loaded_and_the_rest_starts_afresh(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zero_opt")
    expected = _expected()
    for rank, found in enumerate(run_threads(world_size, _load)):
        assert_bitwise(found["params"], expected["params"])
        if rank == 0:
            assert_bitwise(found["state"], expected["state"])
    left_out, fresh = [record.getMessage() for record in caplog.records]
    assert "parameter 1 has shape (7,)" in left_out and "parameter 8, which is in no param group" in left_out
    assert "no state for 1 of 3 parameters, the first of them parameter 1 (group 0, position 1)" in fresh


def test_groups_that_are_others_stay_an_error() -> None:
    opt = zero_opt.ShardedOptimizer(_params(), torch.optim.Adam)
    saved = _saved()
    saved["param_groups"].append(saved["param_groups"][0])
    with pytest.raises(zero_opt.StateDictError, match="2 param groups, the optimizer 1"):
        opt.load_state_dict(saved, strict=False)


def _refuses(optimizer: zero_opt.ShardedOptimizer, saved: dict[str, Any], words: str) -> None:
    with pytest.raises(zero_opt.StateDictError, match=words):
        optimizer.load_state_dict(saved, strict=False)


def _load_fewer(rank: int, world_size: int) -> list[Any]:
    """The optimizer lacks parameter 1 of those that were saved."""
    saved, params = _saved(), _params()
    del params[1]
    opt = zero_opt.ShardedOptimizer(params, torch.optim.Adam, reduction=zero_opt.AtStep())
    _refuses(opt, saved, "param group 0 has 3 parameters in the state dict and 2 in the optimizer")
    saved["param_groups"][0]["params"] = [0, 2]
    saved["param_groups"][0]["lr"] = -1.0
    _refuses(opt, saved, "lr")
    saved["param_groups"][0]["lr"] = 0.5
    opt.load_state_dict(saved, strict=False)
    opt.consolidate_state_dict()
    states = opt.state_dict()["state"] if rank == 0 else {}
    opt.close()
    return [*states.values()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_keep_their_numbers_of_parameters_unless_the_dict_is_changed(world_size: int) -> None:
    saved = _saved()["state"]
    assert_bitwise(run_threads(world_size, _load_fewer)[0], [saved[0], saved[2]])


def _strict_of_one(rank: int, world_size: int) -> str:
    opt = zero_opt.ShardedOptimizer(_params(), torch.optim.Adam, reduction=zero_opt.AtStep())
    with pytest.raises(zero_opt.ConfigTypeError) as caught:
        opt.load_state_dict(_saved(), strict=rank if rank else False)  # type: ignore[arg-type]
    opt.close()
    return str(caught.value)


def test_strict_is_true_or_false_on_every_rank() -> None:
    for message in run_threads(2, _strict_of_one):
        assert "strict must be True or False, got 1" in message


# -- what no step could use, and what only some steps could -----------------------------------------------------------

PLACEMENTS: dict[str, dict[str, Any]] = {
    "no offload": {},
    "CPUOffload": {"offload": zero_opt.CPUOffload()},
    "WorkerOffload": {"offload": zero_opt.WorkerOffload(threads=1)},
    "NVMeOffload": {"offload": zero_opt.NVMeOffload(tempfile.gettempdir(), threads=1)},
    "Selective": {"offload": zero_opt.WorkerOffload(threads=1, selective=zero_opt.Selective())},
}


def _without_memory() -> torch.Tensor:
    shrunk = torch.ones(SHAPES[0])
    shrunk.untyped_storage().resize_(0)
    return shrunk


def _unusable() -> Iterator[tuple[Any, Any]]:
    """Pairs of a key and a value that no state of parameter 0 may have, over several ranks."""
    ones = torch.ones(SHAPES[0])
    yield from (("step", torch.tensor(value)) for value in (3 + 1j, True, torch.nan, torch.inf, -1.0))
    yield from (("step", value) for value in (3j, True, "3", None, 1e300, 2**200))
    yield "step", torch.tensor(1e300, dtype=torch.float64)
    yield "step", torch.quantize_per_tensor(torch.tensor(3.0), 0.1, 0, torch.qint8)
    yield "step", torch.zeros((), dtype=torch.uint8).view(torch.bits8)
    for key in ("exp_avg", "master", "user's own"):
        yield key, torch.nested.nested_tensor([torch.ones(6)] * 40)
        yield key, ones.to_sparse()
        yield key, torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
        yield key, masked_tensor(ones, ones.bool())
        yield key, ones.to(torch.uint8).view(torch.bits8)
        yield key, ones.to(device="meta")
        yield key, nn.UninitializedParameter()
        yield key, _without_memory()
        yield key, wrapped(*SHAPES[0])
        yield key, wrapped(*SHAPES[0], offset=1)
    yield from (("exp_avg", value) for value in (ones.to(torch.complex64), ones.bool(), torch.ones(1), 3.0, "x"))
    yield from (("max_exp_avg_sq", value) for value in (ones.int(), torch.ones(1), 3.0, "x"))
    yield from ((key, 1.0) for key in (("a", 1), b"x", frozenset([1])))


def _go_on(rank: int, world_size: int, placement: str, refused: list[tuple[Any, Any]]) -> Any:
    """Load, try to load every one of ``refused``, and take a step."""
    params = _params()
    options = PLACEMENTS[placement]
    opt = zero_opt.ShardedOptimizer(params, torch.optim.Adam, lr=0.1, reduction=zero_opt.AtStep(), **options)
    opt.load_state_dict(_saved())
    for key, value in refused:
        saved = copy.deepcopy(_saved())
        saved["state"][0][key] = value
        with pytest.raises(zero_opt.StateDictError, match="parameter 0"):
            opt.load_state_dict(saved)
    _fill(params)
    opt.step()
    opt.consolidate_state_dict()
    found = [p.detach().clone() for p in params], opt.state_dict() if rank == 0 else None
    opt.close()
    return found


BAD_COLUMNS = [
    ("column_steps", torch.ones(1, 6, dtype=torch.complex64)),
    ("column_steps", torch.ones(1)),
    ("column_steps", torch.ones(1, 6)),  # and no other key of columns
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_no_step_could_use_is_refused_on_every_rank_before_anything_is_written(placement: str) -> None:
    refused = [*_unusable(), *BAD_COLUMNS]
    assert_bitwise(run_threads(2, _go_on, placement, refused), run_threads(2, _go_on, placement, []))


COUNTS = [
    *(torch.tensor(200, dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64)),
    *(torch.tensor(200, dtype=dtype) for dtype in (torch.uint64, torch.float16, torch.float64)),
    *(torch.tensor(256.0, dtype=torch.bfloat16), torch.tensor(3.0).to(torch.float8_e4m3fn)),
    *(torch.tensor(255, dtype=torch.uint8), torch.tensor(2**63 - 1), 200, 200.0, 2**62),
]


def _from_counts(rank: int, world_size: int, placement: str, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    found = []
    params = _params()
    opt = zero_opt.ShardedOptimizer(
        params, torch.optim.Adam, lr=0.1, reduction=zero_opt.AtStep(), **PLACEMENTS[placement], **options
    )
    for count in COUNTS:
        saved = copy.deepcopy(_saved())
        saved["param_groups"][0].update(options)
        for state in saved["state"].values():
            state["step"] = count
        with torch.no_grad():
            for param, fresh in zip(params, _params(), strict=True):
                param.copy_(fresh)
        opt.load_state_dict(saved)
        for _ in range(2):
            _fill(params)
            opt.step()
        opt.flush()
        found.append([param.detach().clone() for param in params])
    opt.close()
    return found


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_count_of_any_real_dtype_is_counted_on_from(world_size: int, foreach: bool | None) -> None:
    """torch adds one to some of them alone, and of those 255 and 2^63 - 1 it makes what is no count."""
    expected = []
    for count in COUNTS:
        params = _params()
        plain = torch.optim.Adam(params, foreach=foreach)
        saved = copy.deepcopy(_saved())
        saved["param_groups"][0]["foreach"] = foreach
        for state in saved["state"].values():
            state["step"] = torch.tensor(float(count), dtype=torch.float64)
        plain.load_state_dict(saved)
        for _ in range(2):
            _fill(params)
            plain.step()
        expected.append([param.detach() for param in params])
    for found in run_threads(world_size, _from_counts, "no offload", {"foreach": foreach}):
        assert_bitwise(found, expected)


def test_a_worker_counts_on_from_any_of_them() -> None:
    one, other = (run_threads(n, _from_counts, "WorkerOffload", {}) for n in (1, 2))
    assert_bitwise(one[0], other[0])


def _with_keys(rank: int, world_size: int) -> Any:
    params = _params()
    opt = zero_opt.ShardedOptimizer(params, torch.optim.Adam, lr=0.1, reduction=zero_opt.AtStep())
    saved = copy.deepcopy(_saved())
    saved["state"][0].update({7: torch.ones(SHAPES[0]), "7": 1.0, None: 2, 0.5: 4})
    if world_size == 1:
        saved["state"][0]["a", 1] = 3.0
    opt.load_state_dict(saved)
    _fill(params)
    opt.step()
    opt.consolidate_state_dict()
    found = [p.detach().clone() for p in params], opt.state_dict() if rank == 0 else None
    opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_keys_that_are_no_strings_are_carried_along_as_by_torch(world_size: int) -> None:
    state = run_threads(world_size, _with_keys)[0][1]["state"][0]
    assert_bitwise(state[7], torch.ones(SHAPES[0]))
    assert (state["7"], state[None], state[0.5]) == (1.0, 2, 4)
    assert ("a", 1) in state or world_size == 2


def _from_dtensors(rank: int, world_size: int, placement: str) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for cut in (None, Shard(0), Replicate()):
        params = _params()
        options = PLACEMENTS[placement]
        opt = zero_opt.ShardedOptimizer(params, torch.optim.Adam, reduction=zero_opt.AtStep(), **options)
        saved = copy.deepcopy(_saved())
        for state in saved["state"].values() if cut else ():
            state["exp_avg"] = distribute_tensor(state["exp_avg"], mesh, [cut])
            state["step"] = distribute_tensor(state["step"], mesh, [Replicate()])
        opt.load_state_dict(saved)
        _fill(params)
        opt.step()
        found.append([param.detach().clone() for param in params])
        opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("placement", ["no offload", "CPUOffload", "WorkerOffload"])
def test_dtensors_load_for_plain_parameters(placement: str, world_size: int) -> None:
    for plain, *others in run_processes(world_size, _from_dtensors, placement):
        for other in others:
            assert_bitwise(other, plain)


# -- keys that users add ---------------------------------------------------------------------------------------------


def _loads_more(rank: int, world_size: int, offload: Any, strict: bool) -> Any:
    """Load a state dict to which the user has added a key, of the first parameter."""
    params = _params()
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, lr=0.5, reduction=zero_opt.AtStep(), offload=offload
    )
    _fill(params)
    optimizer.step()
    optimizer.flush()
    saved = optimizer.state_dict()
    optimizer.flush()  # until all ranks have read it
    saved["state"][0]["mine"] = "a word"
    try:
        optimizer.load_state_dict(saved, strict=strict)
    except zero_opt.StateDictError as error:
        return str(error)
    found = optimizer.state_dict()["state"]
    optimizer.flush()
    return [sorted(found.get(index, ())) for index in range(2)]


_DELAY = zero_opt.WorkerOffload(delay=1)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("offload", [zero_opt.WorkerOffload(), _DELAY, "nvme"], ids=["worker", "delay", "nvme"])
def test_loaded_state_that_has_no_place_is_refused(offload: Any, world_size: int, tmp_path: Path) -> None:
    offload = zero_opt.NVMeOffload(tmp_path) if offload == "nvme" else offload
    for message in run_processes(world_size, _loads_more, offload, True):
        assert "the state of parameter 0 has 'mine', which has no place" in message
    for first, second in run_processes(world_size, _loads_more, offload, False):
        assert (first, second) == ([], ["exp_avg", "exp_avg_sq", "step"])


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["device", "host"])
def test_loaded_state_that_is_the_users_own_is_kept_beside_the_parameters(offload: Any) -> None:
    for first, _ in run_processes(2, _loads_more, offload, True):
        assert first == ["exp_avg", "exp_avg_sq", "mine", "step"]


def _other_class(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """State of NAdam, which has one value more, in AdamW: as a plain AdamW goes on with it, and nothing is dropped."""
    # Whole vectors: torch's fused kernel steps what is left of one with other bits.
    params, theirs = ([nn.Parameter(values(3, 0, 0, i, (8, 32)).clone()) for i in range(2)] for _ in range(2))
    source = torch.optim.NAdam(params, lr=0.5)
    _fill(params)
    source.step()
    saved = source.state_dict()
    for group in saved["param_groups"]:
        group["fused"] = True
    plain = torch.optim.AdamW(theirs, lr=0.5, fused=True)
    for param, other in zip(params, theirs, strict=True):
        other.data.copy_(param.data)
    plain.load_state_dict(copy.deepcopy(saved))
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=zero_opt.AtStep(), **options)
    optimizer.load_state_dict(saved)
    for stepped, opt in ((params, optimizer), (theirs, plain)):
        for _ in range(2):
            _fill(stepped)
            opt.step()
    assert_bitwise([param.detach() for param in params], [param.detach() for param in theirs])
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        found = optimizer.state_dict()["state"]
        assert "mu_product" in found[0]
        assert_bitwise(found, plain.state_dict()["state"])
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["device", "cpu"])
def test_state_of_another_class_that_fits_goes_on_as_in_the_plain_class(world_size: int, offload: Any) -> None:
    run_threads(world_size, _other_class, {"offload": offload, "fused": True})


def _momentum_off(rank: int, world_size: int) -> None:
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False}
    theirs = _params()
    plain = torch.optim.SGD(theirs, **options)
    _fill(theirs)
    plain.step()
    plain.param_groups[0]["momentum"] = 0.0
    params = [nn.Parameter(param.detach().clone()) for param in theirs]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, reduction=zero_opt.AtStep(), **options)
    for _ in range(2):  # into groups with and without a momentum
        optimizer.load_state_dict(plain.state_dict())
    for stepped, opt in ((params, optimizer), (theirs, plain)):
        _fill(stepped)
        opt.step()
    assert_bitwise([param.detach() for param in params], [param.detach() for param in theirs])
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_momentum_that_was_turned_off_beside_nesterov_is_loaded(world_size: int) -> None:
    run_threads(world_size, _momentum_off)


def _with_other_keys(rank: int, world_size: int, offload: Any) -> None:
    params = _params()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, lr=0.1, fused=True, offload=offload)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    optimizer.param_groups[0]["own"] = 1
    optimizer.load_state_dict(_saved())
    assert optimizer.param_groups[0].keys() == torch.optim.Adam(params).param_groups[0].keys()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert scheduler.base_lrs == [0.5]
    _fill(params)
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()])
@pytest.mark.parametrize("world_size", [1, 2])
def test_keys_of_a_group_that_the_dict_lacks_are_gone_as_in_torch(world_size: int, offload: Any) -> None:
    """As ``initial_lr`` of a scheduler of before, which the next one would begin from."""
    run_processes(world_size, _with_other_keys, offload)
