"""``python -m zero_opt doctor --ranks``, on every rank of a launch: what ranks have alike and what not, told by rank 0.

Ranks meet in the store that the launcher names, where each leaves what it has found. Then they connect as an optimizer
connects them. Every wait has a bound, so that a rank that cannot reach the others says so, and ends.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..comm.backend_errors import first_line
from ..comm.rendezvous import resolve_group
from ..comm.short_lived import short_lived_group
from ..comm.store import STORE_ERRORS, StoreCalls
from ..comm.store_keys import missing, values
from ..errors import ConfigError, PeerLost, ZeroOptError
from ..system.numa import ranges
from ..system.waiting import until
from .doctor import BAD, OK, Finding, examine, print_report

# torch does not declare these names.
_stores: Any = dist
# Seconds that ranks may take to come, and connections to be made.
PATIENCE_S = 30.0
# Seconds that rank 0, which may serve the store, gives the others to read the outcome.
_READING_S = 10.0
_CALL = "doctor --ranks"
_YES = "yes"

_ONE_VERSION = "install one version on all hosts"
_SLOWEST = "differs, which changes no results: the slowest rank sets the pace"
# What is the same on all ranks where training works, and what to do if it is not.
_MUST_AGREE = {
    "zero_opt": _ONE_VERSION,
    "torch": _ONE_VERSION,
    "native": "build the extension on all hosts (python -m zero_opt doctor says why it is missing), or use no offload "
    "that needs it",
    "worker": "WorkerOffload is refused on the ranks without; python -m zero_opt doctor says what to do there",
    "gloo": _ONE_VERSION,
    "nccl": _ONE_VERSION,
    "accelerator": "ranks need devices of one type; nvidia-smi and CUDA_VISIBLE_DEVICES say more",
    "bf16": "use another dtype, or devices that have this one",
    "path": "NVMeOffload is refused there; give another directory, where a file can be made",
    "WORLD_SIZE": "start all hosts with the same number of ranks",
}
# What may differ.
_MAY_DIFFER = {
    "python": "differs, which is seldom meant: install one version on all hosts",
    "kernels": _SLOWEST,
    "cores": _SLOWEST,
    "numa": _SLOWEST,
    "torch threads": _SLOWEST,
    "devices": _SLOWEST,
    "shared memory": "where ranks of a host have none, gradients go through torch.distributed",
    "huge pages": _SLOWEST,
}
# Variables that say something of one host or rank, and those that all ranks must have alike.
_OWN_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG"),
    *("NCCL_DEBUG_FILE", "NCCL_TOPO_FILE", "OMP_NUM_THREADS", "ZERO_OPT_ISA"),
)
_COMMON_VARIABLES = ("TORCH_GLOO_LAZY_INIT", "TORCH_NCCL_", "NCCL_")


class _Launch:
    """The store that the launcher names, and what ranks have left there.

    Attributes:
        rank, world_size: as the launcher has it.

    Raises:
        ConfigError: no launcher has started this process. PeerLost: the store cannot be reached.
    """

    def __init__(self, patience_s: float) -> None:
        absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if absent:
            raise ConfigError(
                f"doctor --ranks is run by every rank, and no launcher has set {', '.join(absent)}: torchrun "
                "--nproc-per-node=2 -m zero_opt doctor --ranks"
            )
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        try:
            self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            # torch's own rendezvous would wait for all ranks, and not say which is missing.
            store = _stores.TCPStore(
                address, int(port), self.world_size, serves, timedelta(seconds=patience_s), wait_for_workers=False
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise PeerLost(
                f"rank {os.environ['RANK']} does not reach the store at {address}:{port} (MASTER_ADDR, MASTER_PORT), "
                f"where ranks meet: {first_line(error)}. Look at whether rank 0 runs, the address, and firewalls"
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store: Any = _stores.PrefixStore(f"{_CALL}/{attempt}", store)
        self._ask, self._patience_s = StoreCalls(), patience_s

    def leave(self, kind: str, text: str) -> None:
        """Leave a text for the other ranks."""
        self._ask(self.store.set, f"{kind}/{self.rank}", text)

    def absent(self, kind: str, ranks: Collection[int], patience_s: float | None = None) -> list[int]:
        """Wait for the ranks to leave a text, and return those that have not within the time."""
        keys = [f"{kind}/{rank}" for rank in ranks]
        if until(lambda: self._ask(self.store.check, keys), self._patience_s if patience_s is None else patience_s):
            return []
        absent = missing(partial(self._ask, self.store.check), keys)
        return [rank for rank, key in zip(ranks, keys, strict=True) if key in absent]

    def read(self, kind: str, ranks: Sequence[int]) -> dict[int, str]:
        """Return the texts that ranks have left."""
        texts = self._ask(values, self.store, [f"{kind}/{rank}" for rank in ranks]) if ranks else []
        return {rank: text.decode() for rank, text in zip(ranks, texts, strict=True)}

    def connects(self) -> str:
        """Connect all ranks as an optimizer does, and return ``"yes"`` or why that fails. All ranks call it."""
        try:
            store = _stores.PrefixStore("group", self.store)
            patience = timedelta(seconds=self._patience_s)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=patience)
            group = resolve_group(None)
            if group is not None and self.world_size > 1:
                with short_lived_group(group, _CALL) as ours:
                    ours.all_gather_bytes(b"")
        except (ZeroOptError, RuntimeError, ValueError, OSError) as error:
            return first_line(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return _YES

    def close(self) -> None:
        """Call the store no more."""
        self._ask.close()


def facts(version: str, path: str | None) -> dict[str, str]:
    """Return what this rank has, by name.

    Args:
        version: of zero_opt. path: as for :func:`examine`.
    """
    found = {finding.name: finding for finding in examine(path)}
    native = found["native"]
    has = {name: found[name].found for name in ("worker", "shared memory", "cores", "numa", "huge pages")}
    has |= {name: found[name].found for name in ("gloo", "nccl") if name in found}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [f for f in found.values() if f.name.startswith(f"{accelerator.type}:")]
    bf16 = None if accelerator is None else getattr(torch.get_device_module(accelerator), "is_bf16_supported", None)
    has |= {
        "host": platform.node(),
        "zero_opt": version,
        "torch": torch.__version__,
        "torch threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "native": _YES if native.status == OK else native.found,
        "kernels": native.found,
        "accelerator": "none" if accelerator is None else accelerator.type,
        "devices": ", ".join(device.found for device in devices),
        "bf16": _YES if bf16 is None or bf16() else "no",
    }
    if path is not None:
        has["path"] = _YES if found["path"].status == OK else found["path"].advice
    unusable = [f"{f.name}: {f.found}" for f in found.values() if f.status == BAD and f.name != "path"]
    has["usable"] = "; ".join(unusable) or _YES
    variables = (*_OWN_VARIABLES, *_COMMON_VARIABLES, "WORLD_SIZE")
    return has | {name: value for name, value in os.environ.items() if name.startswith(variables)}


def compared(facts_of: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield a finding for everything that ranks have; BAD where they do not train together as they are.

    Args:
        facts_of: of :func:`facts`, by rank.
    """
    hosts = {rank: has["host"] for rank, has in facts_of.items()}
    yield Finding(OK, "hosts", f"{len(set(hosts.values()))}: {_by_value(hosts)}")
    unusable = {rank: has["usable"] for rank, has in facts_of.items() if has["usable"] != _YES}
    if unusable:
        yield Finding(BAD, "usable", _by_value(unusable), "python -m zero_opt doctor there says what to do")
    rows: dict[str, tuple[str, str]] = {name: (BAD, advice) for name, advice in _MUST_AGREE.items()}
    rows |= {name: (OK, advice) for name, advice in _MAY_DIFFER.items()}
    known = dict.fromkeys(name for has in facts_of.values() for name in has)
    for name in sorted(known.keys() - rows.keys() - {"host", "usable"}):
        own = name in _OWN_VARIABLES
        rows[name] = (OK, "differs between ranks") if own else (BAD, f"set {name} alike on all ranks, or nowhere")
    for name, (status, advice) in rows.items():
        has = {rank: of.get(name, "unset" if name.isupper() else "") for rank, of in facts_of.items()}
        if not any(has.values()):
            continue
        fails = len(set(has.values())) > 1 or (name == "path" and _YES not in has.values())
        yield Finding(status if fails else OK, name, _by_value(has), advice if fails else "")


def _by_value(values_of: Mapping[int, str]) -> str:
    """Return one value, or each with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values_of.items():
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) == 1:
        return next(iter(ranks_of))
    return "; ".join(f"{named(ranks)}: {value or 'none'}" for value, ranks in ranks_of.items())


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``ranks 0-3, 6``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def print_comparison(
    version: str, path: str | None = None, *, as_json: bool = False, patience_s: float = PATIENCE_S
) -> int:
    """Compare all ranks of a launch; rank 0 prints. Every rank calls it. Takes a few ``patience_s`` at most.

    Args:
        version, path: as for :func:`facts`. as_json: as for :func:`print_report`.

    Returns:
        0 if ranks can train together as they are, else 1, on every rank that learns it.

    Raises:
        ConfigError: no launcher has started this process.
    """
    try:
        launch = _Launch(patience_s)
        try:
            launch.leave("facts", json.dumps(facts(version, path)))
            return _compare(launch, as_json, patience_s)
        finally:
            launch.close()
    except STORE_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _compare(launch: _Launch, as_json: bool, patience_s: float) -> int:
    """Return the exit status, once this rank has left its facts."""
    everyone = range(launch.world_size)
    absent = launch.absent("facts", everyone)
    launch.leave("connects", "not tried" if absent else launch.connects())
    if launch.rank != 0:
        # Rank 0 waits for each rank that has come until that has connected, which takes two parts.
        if launch.absent("outcome", [0], 4 * patience_s):
            raise PeerLost(f"{named([launch.rank])} has had no answer from rank 0; its log may say more")
        status = int(launch.read("outcome", [0])[0])
        with suppress(*STORE_ERRORS):
            launch.leave("read", "")
        return status
    came = [rank for rank in everyone if rank not in absent]
    silent = launch.absent("connects", came, 3 * patience_s)
    findings = [*compared({rank: json.loads(text) for rank, text in launch.read("facts", came).items()})]
    findings += _connections(launch.read("connects", [rank for rank in came if rank not in silent]), absent, silent)
    status = print_report(findings, as_json=as_json)
    launch.leave("outcome", str(status))
    launch.absent("read", [rank for rank in came[1:] if rank not in silent], _READING_S)
    return status


def _connections(told: Mapping[int, str], absent: Sequence[int], silent: Sequence[int]) -> Iterator[Finding]:
    """Yield whether all ranks have come, and whether messages arrive."""
    if absent:
        text = f"{len(told) + len(silent)} of {len(told) + len(silent) + len(absent)} have come, {named(absent)} not"
        yield Finding(BAD, "ranks", text, "look at their logs, and start the command on every host")
        return
    yield Finding(OK, "ranks", f"{len(told) + len(silent)} of {len(told) + len(silent)} have come")
    why = {rank: text for rank, text in told.items() if text != _YES} | dict.fromkeys(silent, "no answer")
    if why:
        advice = "ranks reach the store but not each other: see GLOO_SOCKET_IFNAME, addresses of hosts, and firewalls"
        yield Finding(BAD, "messages", _by_value(why), advice)
    else:
        yield Finding(OK, "messages", "arrive between all ranks, by gloo")
