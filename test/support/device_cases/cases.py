"""Every tier and policy, as cases that have the same bits on every device; see :class:`Case`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch

import zero_opt
from test.support.compact_training import FORMS
from test.support.device_cases import programs
from test.support.device_cases.training import COLUMNS, EVEN, FUSED, MATRICES, Case, differs

BF16, FP16 = torch.bfloat16, torch.float16
MASTERS = zero_opt.MixedPrecision(torch.float32)
# Sub-groups of one or a few slices.
TINY_MB = 1024 / 2**20
SELECTIVE = zero_opt.Selective(topk_ratio=0.25, select_interval=4, update_interval=2)

TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "masters": {"options": {"precision": MASTERS}, "dtype": BF16},
    "host": {"offload": zero_opt.CPUOffload(), "arguments": FUSED},
    "host, in parts": {
        "offload": zero_opt.CPUOffload(ratio=0.5, subgroup_mb=TINY_MB),
        "arguments": {**FUSED, "fused": False, "foreach": False},
    },
    "host, pageable": {"offload": zero_opt.CPUOffload(pin_memory=False, subgroup_mb=TINY_MB), "arguments": FUSED},
    "worker": {"offload": zero_opt.WorkerOffload(threads=1), "arguments": FUSED},
    "worker, late": {"offload": zero_opt.WorkerOffload(delay=1, threads=1), "arguments": FUSED},
    "worker, speculating": {"offload": zero_opt.WorkerOffload(speculate=True, threads=1), "arguments": FUSED},
    "file": {"offload": zero_opt.NVMeOffload(tempfile.gettempdir(), window_mb=0.01, threads=1), "arguments": FUSED},
    "host, columns": {
        "offload": zero_opt.CPUOffload(selective=SELECTIVE, subgroup_mb=TINY_MB),
        "arguments": FUSED,
        "shapes": COLUMNS,
    },
    "worker, columns": {
        "offload": zero_opt.WorkerOffload(selective=SELECTIVE, threads=1),
        "arguments": FUSED,
        "shapes": COLUMNS,
    },
    "file, columns": {
        "offload": zero_opt.NVMeOffload(tempfile.gettempdir(), window_mb=0.01, threads=1, selective=SELECTIVE),
        "arguments": FUSED,
        "shapes": COLUMNS,
    },
}
REDUCTIONS = ("Overlapped", "AtStep", "AlreadyReduced", "DDP", "DDPHook")
# What each reduction is combined with, beside a tier: a dtype, accumulation, clipping.
DTYPES = (torch.float32, BF16, FP16)
# gloo has no all-reduce of the device's tensors; DDP knows no streams but those of one device.
_UNDER_DDP: dict[str, Any] = {"world_sizes": (2,), "relayed": False, "several_devices": False, "unused": False}

# All ranks, and one thread of autograd, call collectives of the program's own in the same order.
_IN_ORDER: dict[str, Any] = {"several_devices": False, "unused": False}


def _tiers() -> Iterator[Case]:
    """Every tier under every reduction; dtypes take turns."""
    turn = 0
    for tier, fields in TIERS.items():
        for reduction in REDUCTIONS:
            if "speculating" in tier and reduction not in ("Overlapped", "DDPHook"):
                continue
            dtype = torch.float32 if tier in ("device", "host, in parts") else DTYPES[turn % 3]
            turn += 1
            found = {"dtype": dtype, **fields}
            if "DDP" in reduction:
                found |= _UNDER_DDP
            yield Case(f"{tier}, {reduction}, {str(found['dtype'])[6:]}", reduction=reduction, **found)


def _accumulating() -> Iterator[Case]:
    """Several backwards of a step."""
    for name, changes in {
        "no_sync": {"no_sync": True},
        "each reduced": {},
        "in fp32": {"dtype": BF16, "options": {"precision": zero_opt.MixedPrecision(torch.float32, torch.float32)}},
        "bf16, summed in fp32": {
            "dtype": BF16,
            "options": {"precision": zero_opt.MixedPrecision(torch.float32, None, torch.float32)},
        },
    }.items():
        for reduction in ("Overlapped", "AtStep"):
            yield Case(f"accumulating {name}, {reduction}", reduction=reduction, backwards=3, **changes)
    for tier in ("host", "worker", "worker, speculating", "worker, late"):
        yield Case(f"accumulating, {tier}", backwards=2, **TIERS[tier])
    yield Case("accumulating no_sync, DDPHook", "DDPHook", backwards=2, no_sync=True, **_UNDER_DDP)
    yield Case("accumulating, DDPHook", "DDPHook", backwards=2, **_UNDER_DDP)
    yield Case("accumulating no_sync, DDP", "DDP", backwards=2, no_sync=True, **_UNDER_DDP)


def _clipping() -> Iterator[Case]:
    for tier in (
        "device",
        "masters",
        "host",
        "host, in parts",
        "worker",
        "worker, speculating",
        "worker, late",
        "file",
    ):
        fields = {**TIERS[tier]}
        fields["options"] = {**fields.get("options", {}), "max_grad_norm": 0.5}
        yield Case(f"clipped in the step, {tier}", **fields)
    for reduction in ("Overlapped", "AtStep", "AlreadyReduced"):
        yield Case(f"clipped before the step, {reduction}", reduction, program=programs.clipped)
        yield Case(f"scaled, {reduction}", reduction, program=programs.scaled, unused=False)
    for tier in ("masters", "worker", "worker, late"):
        yield Case(f"clipped before the step, {tier}", program=programs.clipped, **TIERS[tier])
        yield Case(f"clipped between two backwards, {tier}", program=programs.clipped_between, **TIERS[tier])
    for tier in ("device", "masters", "worker"):
        fields = {**TIERS[tier], "program": programs.written_in_place, "unused": False}
        yield Case(f"written in place, {tier}", "AtStep", **fields)
        # At world size 1 torch's own clip_grad_norm_, of parameters on devices, takes the norm per device first.
        fields["several_devices"] = tier != "device"
        yield Case(f"written in place and clipped, {tier}", "AtStep", clip=0.5, **fields)
    yield Case("scaled and clipped", program=programs.scaled, clip=0.5, unused=False, several_devices=False)
    yield Case("scaled, fp16 with masters", program=programs.scaled, dtype=FP16, options={"precision": MASTERS})
    for tier in ("worker", "worker, late"):
        yield Case(f"scaled, {tier}", program=programs.scaled, **TIERS[tier])
        fields = {**TIERS[tier], "program": programs.scaled, "unused": False}
        yield Case(f"scaled and clipped, {tier}, AtStep", "AtStep", clip=0.5, **fields)
    yield Case("scaled, host", program=programs.scaled, **TIERS["host"])
    yield Case("scaled, DDPHook", "DDPHook", program=programs.scaled, **_UNDER_DDP)
    for value in ("skip", "raise"):
        yield Case(f"non-finite: {value}", options={"checks": zero_opt.Checks(nonfinite=value)})


def _state() -> Iterator[Case]:
    """State that is saved, loaded, and sent away."""
    tiers = ("device", "masters", "host", "host, in parts", "worker", "worker, late", "file", "host, columns")
    for tier in tiers:
        yield Case(f"state leaves, {tier}", program=programs.state_leaves, **TIERS[tier])
        yield Case(f"one rank asks, {tier}", program=programs.one_rank_asks, **TIERS[tier])
        yield Case(f"state is loaded, {tier}", program=programs.state_is_loaded, **TIERS[tier])
    for tier in ("device", "host", "worker", "masters"):
        yield Case(f"state is loaded in place, {tier}", program=programs.state_is_loaded_in_place, **TIERS[tier])
        yield Case(f"resharded, {tier}", program=programs.resharded, **TIERS[tier])
        yield Case(f"checkpointed, {tier}", program=programs.checkpointed, **TIERS[tier])


def _late() -> Iterator[Case]:
    """Parameters that arrive beside the next forward."""
    for reduction in ("Overlapped", "AtStep", "AlreadyReduced"):
        yield Case(f"gathered late, {reduction}", reduction, late=True)
    for tier in ("masters", "host", "host, in parts", "worker", "worker, speculating", "file"):
        yield Case(f"gathered late, {tier}", late=True, **TIERS[tier])
    yield Case("gathered late, evaluated", late=True, program=programs.evaluated)
    yield Case("gathered late, evaluated, worker", late=True, program=programs.evaluated, **TIERS["worker"])
    yield Case("gathered late, accumulating", late=True, backwards=2, no_sync=True)
    yield Case("gathered late, whole parameters", late=True, **WHOLE["Muon"])


WHOLE: dict[str, dict[str, Any]] = {
    "Muon": {"cls": torch.optim.Muon, "arguments": {"lr": 0.02}, "shapes": MATRICES},
    "Adafactor": {"cls": torch.optim.Adafactor, "arguments": {"lr": 0.02, "foreach": False}},
}


class UnregisteredSGD(torch.optim.SGD):
    """A class not known to be elementwise."""


class RegisteredSGD(torch.optim.SGD):
    """A class of the user's known to be elementwise."""


zero_opt.register_elementwise(RegisteredSGD)


def _classes() -> Iterator[Case]:
    momentum = {"lr": 0.05, "momentum": 0.9, "foreach": False}
    for name, fields in WHOLE.items():
        yield Case(f"whole parameters, {name}", **fields)
        yield Case(f"whole parameters, {name}, AtStep", "AtStep", **fields)
    yield Case("whole parameters, SGD of the user's", cls=UnregisteredSGD, arguments=momentum)
    yield Case("SGD of the user's, registered", cls=RegisteredSGD, arguments=momentum)
    yield Case("SGD in host memory", cls=torch.optim.SGD, arguments=momentum, offload=zero_opt.CPUOffload(ratio=0.5))
    yield Case("Muon in host memory", offload=zero_opt.CPUOffload(subgroup_mb=TINY_MB), **WHOLE["Muon"])
    yield Case("fused on the device", arguments=FUSED, shapes=EVEN)
    yield Case("foreach on the device", arguments={"lr": 0.02, "foreach": True})
    yield Case("RMSprop", cls=torch.optim.RMSprop, arguments={"lr": 0.02, "foreach": False, "centered": True})
    yield Case("complex", dtype=torch.complex64)
    yield Case("complex, AtStep", "AtStep", dtype=torch.complex64)
    yield Case("complex, AlreadyReduced", "AlreadyReduced", dtype=torch.complex64)
    yield Case("complex, gathered late", late=True, dtype=torch.complex64)
    yield Case("fp64", dtype=torch.float64)
    formats = ("columns", "channels_last", "rows")
    shapes = ((40, 3), (3, 5, 7, 2), (33, 9), (65,), (4, 3, 3, 3), (12, 30))
    yield Case("other strides", shapes=shapes, formats=formats)
    yield Case("other strides, host", shapes=shapes, formats=formats, **TIERS["host"])
    yield Case("other strides, worker, bf16", shapes=shapes, formats=formats, dtype=BF16, **TIERS["worker"])
    yield Case("other strides, gathered late", shapes=shapes, formats=formats, late=True)
    yield Case("other strides, AlreadyReduced", "AlreadyReduced", shapes=shapes, formats=formats)


def _events() -> Iterator[Case]:
    """What happens to training programs."""
    uneven: dict[str, Any] = {"program": programs.uneven, "world_sizes": (2,)}
    for reduction in ("Overlapped", "AtStep"):
        yield Case(f"uneven inputs, {reduction}", reduction, **uneven)
    yield Case("uneven inputs, host", **uneven, **TIERS["host"])
    yield Case("uneven inputs, worker", **uneven, **TIERS["worker"])
    yield Case("uneven inputs, AlreadyReduced", "AlreadyReduced", **{**uneven, "program": programs.uneven_by_hand})
    for program in (programs.failed_backward, programs.failed_everywhere, programs.failed_and_dropped):
        name = program.__name__.replace("_", " ")
        yield Case(name, program=program)
        yield Case(f"{name}, bf16 with masters", program=program, **TIERS["masters"])
        yield Case(f"{name}, speculating", program=program, **TIERS["worker, speculating"])
    yield Case("failed backward, host", program=programs.failed_backward, **TIERS["host"])
    yield Case("failed backward, gathered late", program=programs.failed_backward, late=True)
    yield Case("a step after a failure", program=programs.refused_step)
    yield Case("edited", program=programs.edited)
    yield Case("edited, masters", program=programs.edited, **TIERS["masters"])
    yield Case("edited, host", program=programs.edited, **TIERS["host"])
    yield Case("edited, worker", program=programs.edited, **TIERS["worker"])
    yield Case("groups are added", program=programs.groups_are_added)
    for tier in ("host", "worker"):
        yield Case(f"groups are added, {tier}", program=programs.groups_are_added, **TIERS[tier])
    # At world size 1 the wrapped class reads gradients where they are, in its step.
    yield Case("graphs are replayed", program=programs.graph_replays, world_sizes=(2,))
    yield Case("graphs are replayed, host", program=programs.graph_replays, **TIERS["host"])
    yield Case("two optimizers", program=programs.two_optimizers)
    yield Case("sparse gradients of a table", program=programs.sparse)
    yield Case("collectives of the program's own", program=programs.other_collectives, **_IN_ORDER)
    yield Case("gradients of two streams", producers=2)
    yield Case("gradients of three streams, host", producers=3, **TIERS["host"])
    yield Case("gradients of two streams, AtStep", "AtStep", producers=2)
    yield Case("gradients of two streams, accumulating", producers=2, backwards=2, no_sync=True)


def _fsdp() -> Iterator[Case]:
    """DTensors of FSDP2."""
    fields: dict[str, Any] = {**_UNDER_DDP, "fsdp": True, "shapes": MATRICES}
    for tier in ("device", "masters", "host", "worker", "worker, late", "worker, speculating", "file"):
        yield Case(f"FSDP2, {tier}", **{**TIERS[tier], **fields})
    yield Case("FSDP2, clipped", program=programs.clipped, **fields)
    yield Case("FSDP2, clipped, speculating", program=programs.clipped, **{**TIERS["worker, speculating"], **fields})
    yield Case("FSDP2, state is loaded", program=programs.state_is_loaded, **fields)
    yield Case("FSDP2, state leaves", program=programs.state_leaves, **fields)
    yield Case("FSDP2, Muon", **{**WHOLE["Muon"], **fields})


def _compact() -> Iterator[Case]:
    """Every form of AdamState under every offload; of two tiers, what users do to the smallest form."""
    tiers, turn = ("host", "worker", "worker, late", "worker, speculating", "file"), 0
    small: dict[str, dict[str, Any]] = {}
    for form, (dtype, state) in FORMS.items():
        fields = {"cls": zero_opt.CPUAdamW, "arguments": {"lr": 0.02, "state": state}, "dtype": dtype}
        for tier in tiers:
            small[tier] = {**fields, "offload": TIERS[tier]["offload"]}
            reduction = "Overlapped" if "speculating" in tier else REDUCTIONS[turn % 3]
            turn += 1
            yield Case(f"{form}, {tier}", reduction, **small[tier])
            if form == _SMALLEST and tier != "file":
                yield Case(f"{form}, {tier}, DDPHook", "DDPHook", **small[tier], **_UNDER_DDP)
        if form == _SMALLEST:
            for tier in ("host", "worker"):
                yield from _used(f"{form}, {tier}", small[tier])


def _used(name: str, fields: dict[str, Any]) -> Iterator[Case]:
    """What users do in training programs."""
    for program in (
        programs.clipped,
        programs.scaled,
        programs.edited,
        programs.state_leaves,
        programs.one_rank_asks,
        programs.state_is_loaded,
        programs.state_is_loaded_in_place,
        programs.resharded,
        programs.checkpointed,
        programs.checkpointed_as_it_is,
        programs.groups_are_added,
        programs.failed_backward,
    ):
        yield Case(f"{name}, {program.__name__.replace('_', ' ')}", program=program, **fields)
    yield Case(f"{name}, gathered late", late=True, **fields)
    yield Case(f"{name}, accumulating", backwards=2, **fields)
    parts = {**fields, **_UNDER_DDP, "fsdp": True, "shapes": MATRICES}
    yield Case(f"{name}, FSDP2", **parts)
    yield Case(f"{name}, FSDP2, checkpointed as it is", program=programs.checkpointed_as_it_is, **parts)


_SMALLEST = "block8, split"
_SPLIT = Case(
    "split masters",
    dtype=BF16,
    offload=zero_opt.CPUOffload(subgroup_mb=TINY_MB),
    arguments=FUSED,
    options={"precision": zero_opt.MixedPrecision("split")},
)


def _edited_and_saved() -> Iterator[Case]:
    """Parameters are written to before the state is saved."""
    for case in (_SPLIT, Case("host", dtype=BF16, **TIERS["host"])):
        yield differs(case, name=f"edited and saved, {case.name}", program=programs.edited_and_saved, world_sizes=(1,))


GROUPS: dict[str, tuple[Case, ...]] = {
    "tiers": (*_tiers(), _SPLIT, differs(_SPLIT, name="split masters, AtStep", reduction="AtStep")),
    "accumulating": tuple(_accumulating()),
    "clipping": tuple(_clipping()),
    "state": tuple(_state()),
    "late": tuple(_late()),
    "classes": tuple(_classes()),
    "events": (*_events(), *_edited_and_saved()),
    "FSDP2": tuple(_fsdp()),
    "compact": tuple(_compact()),
}
CASES = {case.name: case for cases in GROUPS.values() for case in cases}
