"""The variants that all-reduce their gradients themselves: naive, flat, overlap, bucketed.

Each improves on the one before. In all of them a gradient is divided and copied into a buffer once, and the parameter's
gradient becomes a view of the buffer, so nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_prof import annotate
from ddp_prof.bucket_assignment import EACH_ALONE, assign_buckets, assign_by_readiness
from ddp_prof.ddp.base import DataParallel, Layouts, add_hooks
from ddp_prof.ddp.buckets import cap_in_bytes
from ddp_prof.ddp.collective import broadcast_buffers, broadcast_state, current_device, global_rank
from ddp_prof.ddp.reducer import Reducer
from ddp_prof.errors import CommunicationError

WRAP_AGAIN = "call remove() and wrap the module again"


class ReducingVariant(DataParallel):
    """A variant that reduces its gradients itself: after backward if :attr:`is_blocking`, else from gradient hooks.

    Args:
        module: The model. It and the options must be the same on all ranks; this is checked.
        process_group: ``None`` is the default group.
        find_unused_parameters: Let the ranks vote in each step on which parameters they used, by one small all-reduce
            for whose result the host waits; on a GPU it thus waits until backward and communication are done. With it,
            late gradients (see :mod:`ddp_prof.ddp.reducer`) may come on some ranks only.
        broadcast_buffers: Copy buffers (for example the running statistics of batch normalisation) from rank 0 before
            the first forward, and before each forward after one with synchronization, as torch's DDP does.
        schedule: Options of a subclass that determine what is communicated, and when.
    """

    _not_copied: ClassVar[frozenset[str]] = DataParallel._not_copied | {
        *("_reducer", "_remover", "_structure", "_layouts", "_postponed", "_is_stepping")
    }
    _reducer_type: ClassVar[type[Reducer]] = Reducer
    _cap_bytes: float | Sequence[float] | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        schedule: Mapping[str, object] | None = None,
    ) -> None:
        own = {"find_unused_parameters": find_unused_parameters, "broadcast_buffers": broadcast_buffers}
        super().__init__(module, process_group, {**(schedule or {}), **own})
        broadcast_state(module, process_group)
        self._trained = self.trained_parameters()
        self.assignment = assign_buckets(self._trained, self._cap_bytes)
        self._find_unused = find_unused_parameters
        self._broadcast_buffers = self._are_buffers_due = broadcast_buffers
        self._frozen = [each for each in module.named_parameters() if not each[1].requires_grad]
        self._set_up()

    def _set_up(self) -> None:
        super()._set_up()
        self._reducer = self._make_reducer()
        self._remover = add_hooks(self, self._trained)
        self._stepped = frozenset(map(id, self.optimizer_parameters()))
        self._structure: Structure | None = None
        self._layouts = Layouts(self.module)
        self._postponed: list[tuple[int, int] | None] | None = None  # the gradients at a ``finish`` within ``no_sync``
        self._is_stepping = False  # whether an optimizer runs, of which a closure may be part

    def _make_reducer(self) -> Reducer:
        return self._reducer_type(self._trained, self.assignment, self.process_group, self._find_unused)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; raises CommunicationError if it has a trained parameter that the variant does not know."""
        if torch.is_grad_enabled():
            self._forget_dropped()
        if self._are_buffers_due:
            broadcast_buffers(list(self.module.buffers()), self.process_group)
        is_trained = self._is_synchronizing and torch.is_grad_enabled()
        if is_trained:
            self._check_model()
        self._are_buffers_due = is_trained and self._broadcast_buffers
        return super().forward(*args, **kwargs)

    def on_gradient(self, index: int, _parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter, which backward has just finished. Called by a hook."""
        if not self._is_synchronizing:
            return
        self.is_unfinished = True
        if not self.is_blocking:
            self._reducer.ready(index)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Finish what was postponed; raise an error if gradients are not synchronized. Called before any optimizer."""
        if not self._is_own(optimizer):
            return
        if self.is_unfinished:
            raise CommunicationError(
                "optimizer.step() on gradients that are not synchronized: "
                "call finish_gradient_synchronization() after backward, before the step"
            )
        self._catch_up()
        self._is_stepping = True

    def on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Called by a hook after a step of any optimizer."""
        if self._is_own(optimizer):
            self._is_stepping = False

    def _postpone(self) -> None:
        """Only a step shows whether this was the last micro-batch; within its closure, nothing else would."""
        if self._is_stepping:
            self._finish()
        else:
            self._postponed = self._gradients_seen()

    def _catch_up(self) -> None:
        if self._postponed is None:
            return
        if self._postponed != self._gradients_seen():
            raise CommunicationError(
                "finish_gradient_synchronization() was called within no_sync(), and this rank's own gradients were "
                "changed since, for example scaled or clipped: run the last micro-batch outside of no_sync(); to step "
                "on this rank's own gradients on purpose, leave that call out"
            )
        self._finish()

    def _finish(self) -> None:
        self._postponed = None
        super()._finish()

    def discard(self) -> None:
        super().discard()
        self._postponed = None

    def _gradients_seen(self) -> list[tuple[int, int] | None]:
        gradients = (parameter.grad for parameter in self._trained)
        return [None if each is None else (id(each), each._version) for each in gradients]

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) in self._stepped for group in optimizer.param_groups for parameter in group["params"])

    def remove(self) -> None:
        self._remover()

    def kept_tensors(self) -> list[torch.Tensor]:
        return [view for bucket in self._reducer.buckets for view in bucket.views]

    def _synchronize(self) -> None:
        self._layouts.check()
        self._reducer.finish()

    def _forget_dropped(self) -> None:
        if self.is_unfinished and self._reducer.is_dropped():
            self.is_unfinished = False
            with annotate.synchronize():
                self._reducer.finish(is_discarded=True)

    def _check_model(self) -> None:
        self._layouts.check()
        self._reducer.restore_memory()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise CommunicationError(
                    f"parameter {name!r} was frozen when the variant was made and requires a gradient now: {WRAP_AGAIN}"
                )
        if self._structure is not None and self._structure.is_unchanged():
            return
        known = {id(parameter) for parameter in self._trained}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise CommunicationError(
                    f"parameter {name!r} was added to the model after the variant was made: {WRAP_AGAIN}"
                )
        self._structure = Structure(self.module)


class Structure:
    """The modules and parameters of a module, with a fast check whether they changed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._holders: list[Any] = [held for layer in module.modules() for held in (layer._parameters, layer._modules)]
        self._objects = [*self._iterate_objects()]  # kept, so that their ids are not used again for other objects
        self._ids = [*map(id, self._objects)]

    def is_unchanged(self) -> bool:
        return self._ids == [*map(id, self._iterate_objects())]

    def _iterate_objects(self) -> Iterator[object]:
        # ``dict.values``, because the ``values`` of ``sharded`` waits until the parameters may be read.
        return chain.from_iterable(map(dict.values, self._holders))


class NaiveDDP(ReducingVariant):
    """Naive: after backward, one blocking all-reduce per parameter.

        host      |  forward  |     backward     |           synchronize           |optimizer|
        compute   |###########|##################|                                 |#########|
        all-reduce                               |[p9]|[p8]|[p7]| ... |[p1]|[p0]   |

    Nothing overlaps, and the latency of a collective is paid for each parameter. Arguments as in
    :class:`ReducingVariant`.
    """

    is_blocking: ClassVar[bool] = True
    _cap_bytes = EACH_ALONE

    def _synchronize(self) -> None:
        self._layouts.check()
        for _ in self._reducer.buckets:
            self._reducer.launch_next().wait()
        self._reducer.finish()


class FlatDDP(ReducingVariant):
    """Flat: after backward, one all-reduce of one flat buffer per data type and device.

        host      |  forward  |     backward     |      synchronize      |optimizer|
        compute   |###########|##################|                       |#########|
        all-reduce                               |[ p9 p8 p7 ... p1 p0 ] |

    Nothing overlaps, but the latency of a collective is paid once. Arguments as in :class:`ReducingVariant`.
    """

    is_blocking: ClassVar[bool] = True


class OverlapDDP(ReducingVariant):
    """Overlap: one asynchronous all-reduce per parameter, launched by its gradient hook while backward goes on.

        host      |  forward  |     backward     |synchronize|optimizer|
        compute   |###########|##################|           |#########|
        all-reduce                [p9] [p8] [p7] ... [p1][p0]|

    Launches keep one order, last parameter first: a gradient that is ready early waits for its turn. ``synchronize``
    launches the rest (zeros for unused parameters) and waits for all. Exposed is the tail after backward; the latency
    of a collective is still paid for each parameter. Arguments as in :class:`ReducingVariant`.
    """

    _cap_bytes = EACH_ALONE


class BucketedDDP(ReducingVariant):
    """Bucketed: one asynchronous all-reduce per bucket, launched by the gradient hook that fills the bucket.

        host      |  forward  |     backward     |synchronize|optimizer|
        compute   |###########|##################|           |#########|
        all-reduce                  [p9 p8 p7][p6 p5 p4] ... [p1 p0]   |

    Few large messages use the wire better than many small ones, but the first one starts later and the last one, which
    nothing can hide, takes longer: the cap of a bucket sets the balance. With ``rebuild_buckets`` the first step shows
    in which order gradients become ready; then buckets are assigned again in that order.

        order of parameters()   [p9 p8 p7]  [p6 p5 p4]      p7 is ready last: both buckets wait for it
        order of readiness      [p9 p8 p6]  [p5 p4 p7]      only the second one does

    Args:
        bucket_size_mb: Cap of a bucket in MiB, as torch's ``bucket_cap_mb``; a larger parameter has its own bucket.
            A sequence: caps of the first buckets, the last one for all others; with ``[1, 25]`` a small first bucket is
            launched early, as by default in torch's DDP. ``None``: one bucket per data type and device.
        rebuild_buckets: After the first step in which every parameter had a gradient on rank 0, assign buckets again in
            the order in which gradients became ready on rank 0.
        options: As in :class:`ReducingVariant`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        bucket_size_mb: float | Sequence[float] | None,
        *,
        rebuild_buckets: bool = False,
        **options: Any,
    ) -> None:
        self._cap_bytes = cap_in_bytes(bucket_size_mb)
        self._is_rebuild_due = rebuild_buckets
        schedule = {"bucket_size_mb": bucket_size_mb, "rebuild_buckets": rebuild_buckets}
        super().__init__(module, schedule=schedule, **options)

    def _synchronize(self) -> None:
        super()._synchronize()
        if self._is_rebuild_due:
            self._rebuild()

    def _rebuild(self) -> None:
        """Assign buckets in rank 0's order of readiness, so that all ranks have the same buckets."""
        order = [self._reducer.order]
        with current_device(self.device):
            dist.broadcast_object_list(order, global_rank(0, self.process_group), self.process_group)
        if len(order[0]) < len(self._trained):
            return
        self.assignment = assign_by_readiness(self._trained, self._cap_bytes, order[0])
        self._reducer = self._make_reducer()
        self._is_rebuild_due = False
