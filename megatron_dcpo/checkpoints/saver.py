"""Writing a checkpoint: planned together, written by every rank for itself, in the background if
asked, announced last.

Megatron plans which rank writes what (``torch_dist`` format). The writing itself is one function
per rank that communicates with no other rank, so it can run in a thread on a snapshot of the state
while training goes on. Only when all ranks have written does the first one complete the directory,
rename it and name it in ``latest_checkpointed_iteration.txt``: whenever a process ends, the
previous checkpoint is unchanged.
"""

from __future__ import annotations

import copy
import io
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.checkpoints.manifest import (
    LATEST,
    digest,
    iteration_dir,
    iterations,
    latest_iteration,
    sync_directory,
    write_manifest,
)
from megatron_dcpo.conversion.megatron_checkpoint import BEST
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.distributed import (
    all_gather_objects,
    barrier,
    broadcast_object,
    max_over_ranks,
)
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.megatron_private import plan_checkpoint, use_queue_of_this_process

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)

COMMON = "common.pt"
_NOTHING_FREE = 1 << 20  # bytes


@dataclass
class Pending:
    """A checkpoint on its way. ``results``: what this rank wrote; ``error``: why it could not, or
    later why none could be completed. ``work``: the thread that writes, then the first rank's that
    completes, once all have written.
    """

    iteration: int
    temporary: Path
    rank: int
    writer: Any
    metadata: Any
    common: dict[str, Any]
    work: threading.Thread | None = None
    completing: bool = False
    results: list[Any] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class _Plan:
    """What the next save can take over while the state has the same ``form``: Megatron's plan, and
    the host's copies. ``files``: (name, objects, tensors), of each: what is written, which part of
    the state it is, its copy.
    """

    form: list[Any]
    metadata: Any
    files: list[tuple[str, list[tuple[Any, int, io.BytesIO]], list[tuple[Any, int, Tensor]]]]


class Saver:
    """Saves into ``directory``, keeps the newest ``keep`` checkpoints. All methods are collective.

    ``background``: :meth:`begin` returns as soon as the state is copied, into memory that is kept
    for the next save. ``replicas``: the ranks that hold the same weights share the writing of them.
    ``damaged``: iterations that failed their check; they do not count among those to keep.
    ``best``: what ``best.json`` is to say of the best one, which is kept.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        keep: int,
        background: bool,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.directory = directory
        self.rank = rank
        self.keep = keep
        self.background = background
        self.replicas = replicas
        self.damaged: set[int] = set()
        self.best: dict[str, Any] | None = None
        self._pending: Pending | None = None
        self._known: _Plan | None = None

    def begin(self, iteration: int, state: dict[str, Any]) -> None:
        """Write the sharded ``state``, in the background if so; it is announced by :meth:`finish`,
        :meth:`wait` or the next :meth:`begin`. Afterwards ``state`` may change.

        Raises :class:`UserError` when the disk cannot be written; the previous checkpoint stays the
        latest.
        """
        self.wait()
        self._pending = pending = self._prepare(iteration, state)
        self._run(_write, pending)

    def finish(self) -> None:
        """Make the pending checkpoint the latest, if every rank has written its part. Raises as
        :meth:`begin` does.
        """
        pending = self._pending
        if pending is None or max_over_ranks(
            int(pending.work is not None and pending.work.is_alive())
        ):
            return
        if not pending.completing:
            self._announce(pending)
        if pending.error or not self.background:
            self.wait()

    def wait(self) -> None:
        """Do the same, however long the writing takes."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        if not pending.completing:
            self._announce(pending)
        if pending.work is not None:
            pending.work.join()
        self._fail_if(broadcast_object(pending.error), pending.iteration, pending.temporary)

    def _run(self, work: Callable[..., None], pending: Pending, *more: Any) -> None:
        if self.background:
            pending.work = threading.Thread(target=work, args=(pending, *more), name="checkpoint")
            pending.work.start()
        else:
            work(pending, *more)

    def _announce(self, pending: Pending) -> None:
        """Begin to complete on the first rank when all ranks have written."""
        if pending.work is not None:
            pending.work.join()
        written = all_gather_objects((pending.error, pending.results, pending.files))
        pending.error = next(
            (f"rank {rank}: {part[0]}" for rank, part in enumerate(written) if part[0] is not None),
            None,
        )
        pending.completing = True
        if pending.error is None and self.rank == 0:
            self._run(self._complete, pending, written)

    def _prepare(self, iteration: int, state: dict[str, Any]) -> Pending:
        final = iteration_dir(self.directory, iteration)
        temporary = final.with_name(final.name + ".tmp")
        error: str | None = None
        if self.rank == 0:
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            except OSError as refused:
                error = _line(refused)
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        parts = list(nested_values(sharded))
        form = [_form(part) for part in parts]
        new = self._known is None or self._known.form != form
        if news := max_over_ranks(2 if error else int(new)):
            if news == 2:
                self._fail_if(broadcast_object(error), iteration, temporary)
            writer, metadata = self._plan(state, temporary)
            if self.background:
                self._known = _Plan(
                    form=form,
                    metadata=metadata,
                    files=_files_of_buckets(writer.write_buckets, parts),
                )
        else:
            assert self._known is not None
            writer = filesystem_async.FileSystemWriterAsync(temporary)
            metadata = self._known.metadata
            writer.write_buckets = _refreshed(self._known, temporary, parts)
        return Pending(
            iteration=iteration,
            temporary=temporary,
            rank=self.rank,
            writer=writer,
            metadata=metadata,
            common=copy.deepcopy(common),
        )

    def _plan(self, state: dict[str, Any], temporary: Path) -> tuple[Any, Any]:
        """Return Megatron's writer with this rank's part of the state, and on the first rank the
        metadata.
        """
        use_queue_of_this_process()  # the thread that writes is in it
        sharded, _ = save_preprocess(state)
        if self.replicas is not None:
            shares = determine_main_replica_uniform_distribution(sharded, self.replicas)
            distribute_main_replicas_with_precomputed_distribution(sharded, self.replicas, shares)
        writer, metadata = plan_checkpoint(sharded, temporary)
        writer.write_buckets = _snapshot(
            writer.write_buckets, _storages(sharded) if self.background else set()
        )
        return writer, metadata

    def _complete(
        self, pending: Pending, written: list[tuple[Any, list[Any], dict[str, Any]]]
    ) -> None:
        """Write, on rank 0, metadata, manifest, the final name and the announcement; then remove
        what is too old.
        """
        try:
            self._rename(pending, written)
            if self.best and iteration_dir(self.directory, self.best["iteration"]).is_dir():
                write_atomically(self.directory / BEST, json.dumps(self.best) + "\n")
            self._prune()
        except Exception as refused:  # nothing may be lost in the thread
            pending.error = _line(refused)

    def _rename(
        self, pending: Pending, written: list[tuple[Any, list[Any], dict[str, Any]]]
    ) -> None:
        temporary = pending.temporary
        final = iteration_dir(self.directory, pending.iteration)
        pending.writer.finish(pending.metadata, [results for _, results, _ in written])
        save_config(CheckpointingConfig("torch_dist", 1), str(temporary))
        files = {name: entry for _, _, part in written for name, entry in part.items()}
        files |= {name: digest(temporary / name) for name in (".metadata", "metadata.json")}
        write_manifest(temporary, pending.iteration, files)
        if final.exists():  # a damaged one, or one of steps that were done again
            aside = final.with_name(final.name + ".replaced.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(final, aside)
        os.replace(temporary, final)
        sync_directory(self.directory)
        write_atomically(self.directory / LATEST, str(pending.iteration))
        self.damaged.discard(pending.iteration)

    def _prune(self) -> None:
        kept = [
            iteration for iteration in iterations(self.directory) if iteration not in self.damaged
        ][-self.keep :]
        if self.best:
            kept.append(self.best["iteration"])
        for iteration in iterations(self.directory):
            if iteration not in kept and iteration not in self.damaged:
                shutil.rmtree(iteration_dir(self.directory, iteration), ignore_errors=True)
        remove_leftovers(self.directory)

    def _fail_if(self, error: str | None, iteration: int, temporary: Path) -> None:
        if error is None:
            return
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        barrier()
        raise UserError(
            f"cannot write checkpoint {iteration_dir(self.directory, iteration)} ({error}); "
            f"{last_complete(self.directory)}. Free space or change run_dir, and continue with "
            "--resume auto"
        )


def last_complete(directory: Path) -> str:
    """Return what the first rank finds there, in words. Collective."""
    last = broadcast_object(latest_iteration(directory))
    if last is not None:
        return f"the last complete checkpoint is iteration {last}"
    return "there is no complete checkpoint"


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed save left behind."""
    for path in directory.glob("iter_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _storages(sharded: Any) -> set[int]:
    """Return where the values of a sharded state lie."""
    tensors = (
        part.data
        for part in nested_values(sharded)
        if isinstance(part, ShardedTensor) and part.data is not None
    )
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _form(part: Any) -> tuple[Any, ...]:
    """Return which part of the whole it is."""
    if isinstance(part, ShardedTensor):
        return part.key, part.global_offset, part.local_shape, part.dtype, part.replica_id
    return part.unique_key, part.replica_id


def _files_of_buckets(buckets: list[Any], parts: list[Any]) -> list[Any]:
    """Return :attr:`_Plan.files` of Megatron's buckets."""
    tensors = {
        (p.key, *p.global_offset): n for n, p in enumerate(parts) if isinstance(p, ShardedTensor)
    }
    numbers = tensors | {
        (p.unique_key,): n for n, p in enumerate(parts) if not isinstance(p, ShardedTensor)
    }
    return [
        (
            key,
            *(
                [
                    (item, numbers[item.index.fqn, *(item.index.offset or ())], copied)
                    for item, copied in kind
                ]
                for kind in data
            ),
        )
        for _, key, data in buckets
    ]


def _refreshed(plan: _Plan, directory: Path, parts: list[Any]) -> list[Any]:
    """Return Megatron's buckets, with the values of now."""
    buckets = []
    for name, objects, tensors in plan.files:
        for _, number, host in tensors:
            host.copy_(parts[number].data.detach().reshape(host.shape))
        saved = []
        for item, number, before in objects:
            if parts[number].data is not None:  # as before otherwise
                torch.save([parts[number].data], before := io.BytesIO())
            saved.append((item, before))
        buckets.append(
            (str(directory / name), name, (saved, [(item, host) for item, _, host in tensors]))
        )
    return buckets


def _snapshot(buckets: list[Any] | None, shared: set[int]) -> list[Any]:
    """Return the tensors to write, on the CPU, none of them in a ``shared`` storage. Megatron has
    copied views of one already.
    """
    staged = []
    for path, key, (data, tensors) in buckets or []:
        on_host = [
            (item, t.clone() if t.untyped_storage().data_ptr() in shared else t)
            for item, t in ((item, t.cpu()) for item, t in tensors)
        ]
        staged.append((path, key, (data, on_host)))
    return staged


def _write(pending: Pending) -> None:
    """Write this rank's files, force them to the disk and take their digests. Whatever goes wrong
    is kept in ``error``.
    """
    try:
        if pending.rank == 0:
            with (pending.temporary / COMMON).open("wb") as file:
                torch.save(pending.common, file)
                file.flush()
                os.fsync(file.fileno())
            pending.files[COMMON] = digest(pending.temporary / COMMON)
        if hasattr(pending.writer, "transforms"):
            transforms = [pending.writer.transforms]
        else:
            transforms = []
        for index, bucket in enumerate(pending.writer.write_buckets):
            outcome: queue.Queue[Any] = queue.Queue()
            waiting: queue.Queue[int] = queue.Queue()
            waiting.put(index)
            pending.writer.write_preloaded_data(
                transforms, index, bucket, outcome, waiting, use_fsync=True
            )
            _, results = outcome.get_nowait()
            if isinstance(results, BaseException):
                raise results
            pending.results += results
            pending.files[bucket[1]] = digest(pending.temporary / bucket[1])
    except (
        Exception
    ) as refused:  # nothing may be lost in the thread: a checkpoint with holes would be announced
        # torch's writer turns a full disk into something about file positions
        full = shutil.disk_usage(pending.temporary).free < _NOTHING_FREE
        pending.error = "No space left on device" if full else _line(refused)
    finally:
        pending.writer.write_buckets = []  # the snapshot is not needed any more


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
