"""Writing a checkpoint: planned together, written by every rank independently, in the background if
asked, announced last.

Megatron plans which rank writes what (``torch_dist`` format). The writing itself is one function
per rank that communicates with no other rank, so it can run in a thread on a snapshot of the state
while training continues. Only when all ranks have written does the first one complete the
directory, rename it and name it in ``latest_checkpointed_iteration.txt``. Whenever a process ends,
the previous checkpoint is unchanged.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.checkpoints.manifest import (
    LATEST,
    checksums_in,
    digest,
    iteration_dir,
    iterations,
    latest_iteration,
    sync_directory,
    write_manifest,
)
from megatron_dcpo.checkpoints.staleness import (
    Marks,
    changed,
    changed_throughout,
    checksums,
    checksums_of_values,
    stale,
    together,
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
from megatron_dcpo.runtime.text import read_json_object

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)

logger = logging.getLogger(__name__)

COMMON = "common.pt"
_NOTHING_FREE = 1 << 20  # bytes
_MAKE_ROOM = "Free space or change run_dir, and continue with --resume auto"
_REPORT = (
    "No disk does that: the code that saves has kept an earlier state. Please report it with the "
    "versions that run.json names"
)
# what a rank needs for a save; the largest number decides for all ranks
_KNOWN_PLAN = 0
_NEW_PLAN = 1
_FAILED = 2


@dataclass
class Pending:
    """A checkpoint that is being written.

    marks: of what training changes on this rank, if they are known.
    results: what this rank wrote.
    checksums: of what it wrote, by group.
    error: why it could not write, or later why the checkpoint could not be completed.
    advice: what to do about the error.
    work: the thread that writes; once all ranks have written, the thread in which the first rank
        completes the checkpoint.
    """

    iteration: int
    temporary: Path
    rank: int
    writer: Any
    metadata: Any
    common: dict[str, Any]
    marks: Marks = field(default_factory=dict)
    work: threading.Thread | None = None
    completing: bool = False
    results: list[Any] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    advice: str = _MAKE_ROOM


@dataclass(frozen=True)
class _Written:
    """What a rank says of its part of a checkpoint: the fields of :class:`Pending`; the groups of
    tensors that training has ``changed`` since the last checkpoint; and those of which what this
    rank has written is ``stale``.
    """

    error: str | None
    results: list[Any]
    files: dict[str, dict[str, Any]]
    checksums: dict[str, int]
    changed: set[str]
    stale: set[str]


@dataclass(frozen=True)
class _File:
    """A file of this rank. Each of its objects and tensors has Megatron's item, the number of the
    part of the state, and the copy that is written.
    """

    name: str
    objects: list[tuple[Any, int, io.BytesIO]]
    tensors: list[tuple[Any, int, Tensor]]


@dataclass(frozen=True)
class _Plan:
    """What the next save can reuse while the state has the same ``form``: Megatron's plan, and the
    host's copies in ``files``.
    """

    form: list[Any]
    metadata: Any
    files: list[_File]


class Saver:
    """Saves into ``directory`` and keeps the newest ``keep`` checkpoints. All methods are
    collective.

    background: whether :meth:`begin` returns as soon as the state is copied, into memory that is
        kept for the next save.
    replicas: the ranks that hold the same weights, and share the writing of them.
    damaged: iterations that failed their check; they do not count among those to keep.
    best: the contents of ``best.json``, whose checkpoint is kept.
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
        self._last_marks: Marks = {}
        self._last_part: Mapping[str, int] = {}  # the checksums of what this rank wrote
        self._last_iteration = 0
        self._last_checksums: Mapping[str, int] = {}  # of all ranks together, on the first one

    def continue_after(self, iteration: int, marks: Marks) -> None:
        """Compare the next checkpoint with that of ``iteration``, which was loaded; ``marks`` are
        those of what it holds.
        """
        self._last_marks = marks
        self._last_iteration = iteration
        if self.rank == 0:
            self._last_checksums = checksums_in(iteration_dir(self.directory, iteration))

    def begin(self, iteration: int, state: dict[str, Any], marks: Marks | None = None) -> None:
        """Write the sharded ``state``, in the background if the saver does so. It is announced by
        :meth:`finish`, :meth:`wait` or the next :meth:`begin`. ``state`` may change when this
        returns. ``marks`` of what training changes (:func:`staleness.marks`) show whether what is
        written is as new as that.

        Raises :class:`UserError` if the disk cannot be written, or if what is written is that of an
        earlier checkpoint; the previous checkpoint stays the latest.
        """
        self.wait()
        pending = self._prepare(iteration, state)
        pending.marks = marks or {}
        self._pending = pending
        self._run(_write, pending)

    def finish(self) -> None:
        """Make the pending checkpoint the latest, if every rank has written its part. Raises as
        :meth:`begin` does.
        """
        pending = self._pending
        if pending is None:
            return
        busy = pending.work is not None and pending.work.is_alive()
        if max_over_ranks(int(busy)):
            return
        if not pending.completing:
            self._announce(pending)
        if pending.error or not self.background:
            self.wait()

    def wait(self) -> None:
        """Make the pending checkpoint the latest, however long the writing takes. Raises as
        :meth:`begin` does.
        """
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        if not pending.completing:
            self._announce(pending)
        if pending.work is not None:
            pending.work.join()
        error, advice = broadcast_object((pending.error, pending.advice))
        self._fail_if(error, pending.iteration, pending.temporary, advice)

    def give_up(self, iteration: int) -> None:
        """Complete the pending checkpoint of an earlier iteration; remove that of ``iteration``,
        unless it has been announced. Raises as :meth:`begin` does.
        """
        pending = self._pending
        if pending is None or pending.iteration != iteration or pending.completing:
            self.wait()
            return
        self._pending = None
        if pending.work is not None:
            pending.work.join()
        barrier()
        if self.rank == 0:
            shutil.rmtree(pending.temporary, ignore_errors=True)

    def _run(self, work: Callable[..., None], pending: Pending, *more: object) -> None:
        if self.background:
            pending.work = threading.Thread(target=work, args=(pending, *more), name="checkpoint")
            pending.work.start()
        else:
            work(pending, *more)

    def _announce(self, pending: Pending) -> None:
        """Wait for all ranks, then begin to complete the checkpoint on the first rank."""
        if pending.work is not None:
            pending.work.join()
        written: list[_Written] = all_gather_objects(self._written(pending))
        self._last_marks = pending.marks
        self._last_part = pending.checksums
        pending.error = None
        for rank, of_rank in enumerate(written):
            if of_rank.error is not None:
                pending.error = f"rank {rank}: {of_rank.error}"
                break
        pending.completing = True
        if pending.error is None and self.rank == 0:
            self._run(self._complete, pending, written)

    def _written(self, pending: Pending) -> _Written:
        """Return what this rank has written, compared with what it wrote before."""
        throughout = changed_throughout(self._last_marks, pending.marks)
        return _Written(
            error=pending.error,
            results=pending.results,
            files=pending.files,
            checksums=pending.checksums,
            changed=changed(self._last_marks, pending.marks),
            stale=stale(self._last_part, pending.checksums, throughout),
        )

    def _prepare(self, iteration: int, state: dict[str, Any]) -> Pending:
        final = iteration_dir(self.directory, iteration)
        temporary = final.with_name(final.name + ".tmp")
        error = self._make_directory(temporary)
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        parts = list(nested_values(sharded))
        form = [_form(part) for part in parts]
        if error:
            need = _FAILED
        elif self._known is None or self._known.form != form:
            need = _NEW_PLAN
        else:
            need = _KNOWN_PLAN
        need = max_over_ranks(need)
        if need == _FAILED:
            self._fail_if(broadcast_object(error), iteration, temporary)
        if need == _KNOWN_PLAN:
            assert self._known is not None
            writer = filesystem_async.FileSystemWriterAsync(temporary)
            metadata = self._known.metadata
            writer.write_buckets = _refreshed(self._known, temporary, parts)
        else:
            writer, metadata = self._plan(state, temporary)
            if self.background:
                files = _files_of_buckets(writer.write_buckets, parts)
                self._known = _Plan(form=form, metadata=metadata, files=files)
        return Pending(
            iteration=iteration,
            temporary=temporary,
            rank=self.rank,
            writer=writer,
            metadata=metadata,
            common=copy.deepcopy(common),
        )

    def _make_directory(self, temporary: Path) -> str | None:
        """Make an empty directory, on the first rank; return the error if that fails."""
        if self.rank != 0:
            return None
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        except OSError as refused:
            return _line(refused)
        return None

    def _plan(self, state: dict[str, Any], temporary: Path) -> tuple[Any, Any]:
        """Return Megatron's writer with this rank's part of the state, and on the first rank the
        metadata.
        """
        use_queue_of_this_process()  # the writing thread belongs to it
        sharded, _ = save_preprocess(state)
        if self.replicas is not None:
            shares = determine_main_replica_uniform_distribution(sharded, self.replicas)
            distribute_main_replicas_with_precomputed_distribution(sharded, self.replicas, shares)
        writer, metadata = plan_checkpoint(sharded, temporary)
        shared: set[int] = set()
        if self.background:
            shared = _storages(sharded)
        writer.write_buckets = _snapshot(writer.write_buckets, shared)
        return writer, metadata

    def _complete(self, pending: Pending, written: list[_Written]) -> None:
        """Write, on rank 0, metadata, manifest, the final name and the announcement; then remove
        checkpoints that are too old.
        """
        try:
            sums = together(of_rank.checksums for of_rank in written)
            pending.error = self._stale(pending.iteration, written, sums)
            if pending.error is not None:
                pending.advice = _REPORT
                return
            self._rename(pending, written, sums)
            if self.best and iteration_dir(self.directory, self.best["iteration"]).is_dir():
                write_atomically(self.directory / BEST, json.dumps(self.best) + "\n")
            self._prune()
        except Exception as refused:  # nothing may be lost in the thread
            pending.error = _line(refused)

    def _stale(
        self, iteration: int, written: list[_Written], sums: Mapping[str, int]
    ) -> str | None:
        """Return which groups are those of the last checkpoint although training has changed them;
        None if there is none.
        """
        altered: set[str] = set()
        for of_rank in written:
            altered |= of_rank.changed
        found = [f"{group} of all ranks" for group in stale(self._last_checksums, sums, altered)]
        for rank, of_rank in enumerate(written):
            found += [f"{group} of rank {rank}" for group in of_rank.stale]
        if not found:
            return None
        return (
            f"{', '.join(sorted(found))}: what was written is what checkpoint "
            f"{self._last_iteration} holds, although the optimizer has changed it in the steps "
            f"{self._last_iteration + 1} to {iteration}"
        )

    def _rename(self, pending: Pending, written: list[_Written], sums: Mapping[str, int]) -> None:
        temporary = pending.temporary
        final = iteration_dir(self.directory, pending.iteration)
        pending.writer.finish(pending.metadata, [of_rank.results for of_rank in written])
        save_config(CheckpointingConfig("torch_dist", 1), str(temporary))
        files: dict[str, dict[str, Any]] = {}
        for of_rank in written:
            for name in of_rank.files:
                if name in files:
                    raise OSError(f"two ranks have written {name}")
            files.update(of_rank.files)
        for name in (".metadata", "metadata.json"):
            files[name] = digest(temporary / name)
        write_manifest(temporary, pending.iteration, files, sums)
        if final.exists():  # a damaged one, or one of steps that were repeated
            aside = final.with_name(final.name + ".replaced.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(final, aside)
        os.replace(temporary, final)
        sync_directory(self.directory)
        write_atomically(self.directory / LATEST, str(pending.iteration))
        self.damaged.discard(pending.iteration)
        self._last_iteration = pending.iteration
        self._last_checksums = sums

    def _prune(self) -> None:
        intact = [each for each in iterations(self.directory) if each not in self.damaged]
        kept = intact[-self.keep :]
        if self.best:
            kept.append(self.best["iteration"])
        for iteration in intact:
            if iteration not in kept:
                shutil.rmtree(iteration_dir(self.directory, iteration), ignore_errors=True)
        remove_leftovers(self.directory)

    def _fail_if(
        self, error: str | None, iteration: int, temporary: Path, advice: str = _MAKE_ROOM
    ) -> None:
        if error is None:
            return
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        barrier()
        raise UserError(
            f"cannot write checkpoint {iteration_dir(self.directory, iteration)} ({error}); "
            f"{last_complete(self.directory)}. {advice}"
        )


def read_best(directory: Path) -> dict[str, Any] | None:
    """Return the contents of ``best.json``; None if there is none, or only a damaged one, of which
    a warning tells.
    """
    path = directory / BEST
    if not path.is_file():
        return None
    try:
        best = read_json_object(path)
        return {
            "iteration": int(best["iteration"]),
            "metric": str(best["metric"]),
            "value": float(best["value"]),
        }
    except (UserError, KeyError, TypeError, ValueError) as damaged:
        logger.warning(
            "%s is damaged (%s): metrics.jsonl names the best checkpoint",
            path,
            one_line(damaged, 200),
        )
        return None


def last_complete(directory: Path) -> str:
    """Return in words which checkpoint in ``directory`` is the last, as the first rank sees it.
    Collective.
    """
    last = broadcast_object(latest_iteration(directory))
    if last is not None:
        return f"the last complete checkpoint is iteration {last}"
    return "there is no complete checkpoint"


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed save left behind."""
    for path in directory.glob("iter_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _storages(sharded: dict[str, Any]) -> set[int]:
    """Return the addresses of the storages of a sharded state."""
    addresses = set()
    for part in nested_values(sharded):
        if isinstance(part, ShardedTensor) and part.data is not None:
            addresses.add(part.data.untyped_storage().data_ptr())
    return addresses


def _form(part: ShardedTensor | ShardedObject) -> tuple[Any, ...]:
    """Return what identifies a part of the state, apart from its values."""
    if isinstance(part, ShardedTensor):
        return (part.key, part.global_offset, part.local_shape, part.dtype, part.replica_id)
    return part.unique_key, part.replica_id


def _files_of_buckets(buckets: list[Any], parts: list[Any]) -> list[_File]:
    """Return the files of Megatron's buckets."""
    numbers = {}
    for number, part in enumerate(parts):
        if isinstance(part, ShardedTensor):
            numbers[part.key, *part.global_offset] = number
    for number, part in enumerate(parts):
        if not isinstance(part, ShardedTensor):
            numbers[(part.unique_key,)] = number

    def numbered(items: list[Any]) -> list[Any]:
        triples = []
        for item, copied in items:
            key = (item.index.fqn, *(item.index.offset or ()))
            triples.append((item, numbers[key], copied))
        return triples

    files = []
    for _, name, (objects, tensors) in buckets:
        files.append(_File(name=name, objects=numbered(objects), tensors=numbered(tensors)))
    return files


def _refreshed(plan: _Plan, directory: Path, parts: list[Any]) -> list[Any]:
    """Return Megatron's buckets, refreshed with current values."""
    buckets = []
    for file in plan.files:
        tensors = []
        for item, number, host in file.tensors:
            host.copy_(parts[number].data.detach().reshape(host.shape))
            tensors.append((item, host))
        objects = []
        for item, number, stream in file.objects:
            if parts[number].data is not None:  # otherwise as before
                stream = io.BytesIO()
                torch.save([parts[number].data], stream)
            objects.append((item, stream))
        buckets.append((str(directory / file.name), file.name, (objects, tensors)))
    return buckets


def _snapshot(buckets: list[Any] | None, shared: set[int]) -> list[Any]:
    """Return the buckets with their tensors on the CPU, none of them in a ``shared`` storage.
    Megatron has already copied views of one.
    """
    staged = []
    for path, key, (objects, tensors) in buckets or []:
        on_host = []
        for item, tensor in tensors:
            host = tensor.cpu()
            if host.untyped_storage().data_ptr() in shared:
                host = host.clone()
            on_host.append((item, host))
        staged.append((path, key, (objects, on_host)))
    return staged


def _write(pending: Pending) -> None:
    """Write this rank's files, force them to the disk and take their digests. Any failure is kept
    in ``error``.
    """
    try:
        if pending.rank == 0:
            with (pending.temporary / COMMON).open("wb") as file:
                torch.save(pending.common, file)
                file.flush()
                os.fsync(file.fileno())
            pending.files[COMMON] = digest(pending.temporary / COMMON)
            pending.checksums = checksums_of_values(pending.common)
        transforms = []
        if hasattr(pending.writer, "transforms"):
            transforms = [pending.writer.transforms]
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
        tensors = checksums(_tensors(pending.writer.write_buckets))
        pending.checksums = together([pending.checksums, tensors])
    except Exception as refused:
        # If an error were lost in the thread, a checkpoint with holes would be announced. torch's
        # writer turns a full disk into an error about file positions.
        if shutil.disk_usage(pending.temporary).free < _NOTHING_FREE:
            pending.error = "No space left on device"
        else:
            pending.error = _line(refused)
    finally:
        pending.writer.write_buckets = []  # the snapshot is not needed any more


def _tensors(buckets: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of Megatron's buckets with their names."""
    for _, _, (_, tensors) in buckets:
        for item, tensor in tensors:
            yield item.index.fqn, tensor


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
