"""Parameters that arrive after step(): whoever reads or writes them by other ways than a module has them first."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.late_results import Layers, optimizer_of, slowly
from test.support.scenario import values
from test.support.worker_training import LATER, NOW
from zero_opt.sharding import late_params


class Pruned(nn.Module):
    """What forward reads is made of the parameter by a hook that is older than the optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 10, bias=False)
        prune.random_unstructured(self.layer, "weight", 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class ByMode(nn.Module):
    """Calls a module in training, and reads its weight in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training else nn.functional.linear(x, self.layer.weight)


class Compiled(nn.Sequential):
    """Compiled, and called, before the optimizer is made."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(20, 20) for _ in range(3)))


class GivenCompiled(Compiled):
    """The optimizer is given what torch.compile has made of it."""


class CompiledInside(Compiled):
    """A part of it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self[1] = torch.compile(self[1], backend="eager")


def _read(rank: int, world_size: int, kind: type[nn.Module], late: bool) -> list[Tensor]:
    slowly(pytest.MonkeyPatch())
    warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # Dynamo's own, of tensors that it makes
    torch.manual_seed(0)
    model, found = kind(), []
    compiles = kind in (Compiled, GivenCompiled)
    call = torch.compile(model, backend="eager") if compiles else model
    call(torch.ones(3, 20))
    optimizer = optimizer_of(call if kind is GivenCompiled else model, late, NOW)
    for step in range(4):
        x = values(step, 1, rank, 0, (3, 20))
        model.train()
        out = call(x)
        found.append(out.detach().clone())
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not issubclass(kind, Compiled):  # which it would be anew, for another mode
            with torch.no_grad():
                model.eval()
                found.append(call(x).clone())
    optimizer.close()
    return found


@pytest.mark.parametrize("kind", [Pruned, ByMode, Compiled, GivenCompiled, CompiledInside])
@pytest.mark.parametrize("world_size", [1, 2])
def test_forwards_that_read_parameters_in_other_ways(world_size: int, kind: type[nn.Module]) -> None:
    within, late = (run_processes(world_size, _read, kind, way) for way in (False, True))
    assert_bitwise(late, within)


def _write(rank: int, world_size: int, late: bool) -> list[Tensor]:
    slowly(pytest.MonkeyPatch())
    model = Layers()
    optimizer = optimizer_of(model, late, NOW)
    for step in range(3):
        model.backward(step)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            zero_opt.broadcast_params(model)
        else:
            kept = {name: value.clone() for name, value in model.layers[1].state_dict().items()}
            model.layers[2].load_state_dict(kept)
    optimizer.close()
    return model.copies()


@pytest.mark.parametrize("world_size", [1, 2])
def test_whoever_writes_parameters_waits_for_them(world_size: int) -> None:
    within, late = (run_processes(world_size, _write, way) for way in (False, True))
    assert_bitwise(late, within)


class Held(nn.Module):
    """Takes the place of a module, with its parameter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Adapted(nn.Module):
    """To which a module is added after the optimizer was made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20, bias=False)
        self.block = ByMode()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.block(self.adapter(x) if hasattr(self, "adapter") else x)  # type: ignore[no-any-return]


def _read_parts(rank: int, world_size: int, late: bool) -> list[Tensor]:
    """What modules give when they are called, or saved, by themselves."""
    slowly(pytest.MonkeyPatch())
    torch.manual_seed(0)
    model, found = Adapted(), []
    optimizer = optimizer_of(model, late, NOW)
    model.adapter = nn.Linear(20, 20, bias=False)
    optimizer.add_param_group({"params": list(model.adapter.parameters())})
    model.layer = Held(model.layer)
    for step in range(6):
        model.train()
        x = values(step, 1, rank, 0, (3, 20))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if step % 3 == 0:
                found += [model.layer(x).clone(), model.adapter(x).clone()]
            elif step % 3 == 1:
                found.append(model.adapter.state_dict()["weight"].clone())
            else:
                model.eval()
                found.append(model.block(x).clone())
    optimizer.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_modules_by_themselves(world_size: int) -> None:
    within, late = (run_processes(world_size, _read_parts, way) for way in (False, True))
    assert_bitwise(late, within)


def _read_alone(rank: int, world_size: int, late: bool) -> list[Tensor]:
    """What functions that are compiled, and methods that tell torch nothing, read of a parameter outside of modules."""
    slowly(pytest.MonkeyPatch())
    warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # Dynamo's own, of tensors that it makes
    model, found = Layers(), []
    optimizer = optimizer_of(model, late, NOW)
    weight = max(model.parameters(), key=Tensor.numel)
    doubled = torch.compile(lambda value: value * 2, backend="eager")
    for step in range(6):
        model.backward(step)
        optimizer.step()
        found.append((doubled(weight) if step % 3 else weight.as_subclass(Tensor)).detach().clone())
        optimizer.zero_grad()
    optimizer.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_functions_and_views_of_a_class_wait(world_size: int) -> None:
    within, late = (run_processes(world_size, _read_alone, way) for way in (False, True))
    assert_bitwise(late, within)


def _copy(rank: int, world_size: int) -> bool:
    """Copies of a model are models of their own, and nothing keeps them."""
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 5))
    optimizer, x = optimizer_of(model, True, NOW), torch.ones(2, 20)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.flush()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    same = all(torch.equal(other(x), model(x)) for other in copies)
    forgotten = [weakref.ref(other) for other in copies]
    copies.clear()
    gc.collect()
    optimizer.close()
    return same and not any(found() is not None for found in forgotten)


def test_copies_of_the_model() -> None:
    assert run_processes(1, _copy) == [True]


def _shared(rank: int, world_size: int, first: bool, second: bool, loads: bool) -> list[Tensor]:
    """Two optimizers step the same parameters in turn, or one loads a state dict without masters after the other."""
    slowly(pytest.MonkeyPatch())
    model = Layers(torch.bfloat16 if loads else torch.float32)
    optimizers = [optimizer_of(model, late, NOW, reduction=zero_opt.AtStep) for late in (first, second)]
    saved = torch.optim.AdamW(model.parameters()).state_dict()
    for step in range(3):
        model.backward(step)
        optimizers[0].step()
        optimizers[1].load_state_dict(saved) if loads else optimizers[1].step()
        if loads:
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.close()
    return model.copies()


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_waits_for_the_other_one_of_its_parameters(world_size: int, loads: bool) -> None:
    within = run_processes(world_size, _shared, False, False, loads)
    for lates in ((True, False), (False, True), (True, True)):
        assert_bitwise(run_processes(world_size, _shared, *lates, loads), within, str(lates))


def _pending(rank: int, world_size: int, late: bool) -> list[Tensor]:
    """The second optimizer of the same parameters is refused, and changes nothing, while the first one is pending."""
    model = Layers()
    first = optimizer_of(model, False, LATER, reduction=zero_opt.AtStep)
    second = optimizer_of(model, late, NOW, reduction=zero_opt.AtStep)
    found = []
    for step in range(2):
        model.backward(step)
        first.step()
        before = model.copies()
        with pytest.raises(zero_opt.StepPending, match=r"another ShardedOptimizer .*call flush\(\) of that one"):
            second.step()
        assert_bitwise(model.copies(), before)
        first.flush()
        second.step()
        second.flush()
        found += model.copies()
        first.zero_grad()
        second.zero_grad()
    first.close()
    second.close()
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_of_another_optimizer_that_is_pending_is_named(world_size: int, late: bool) -> None:
    assert_bitwise(*(run_processes(world_size, _pending, way)[0] for way in (late, False)))


def test_a_signal_between_two_lines_leaves_no_parameter_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def wait(self) -> None:
            late.clear()

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    owner, params = Owner(), [nn.Parameter(torch.ones(3)) for _ in range(3)]
    late = late_params.LateParams(owner.wait)
    for clear in (late.clear, lambda: late.clear(params)):
        late.mark(params)
        with monkeypatch.context() as patch:
            patch.setattr(late_params, "_make_plain", struck)
            with pytest.raises(KeyboardInterrupt):
                clear()
        assert all((param * 2).sum() == 6 for param in params)
        assert len(late) == 0 and {*map(type, params)} == {nn.Parameter}
