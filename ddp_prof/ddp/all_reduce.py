"""The variants that all-reduce their gradients themselves: naive, flat, overlap, bucketed.

Each improves on the variant before it. All of them divide a gradient by the number of ranks and copy it into the buffer
of its bucket, once. The parameter's ``grad`` then becomes a view of this buffer, so nothing is copied back.

In the diagrams time runs to the right. The row ``host`` shows the phases of a step, ``###`` is compute on the device,
and ``[p9]`` is the all-reduce of the gradient of parameter 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_prof import annotate
from ddp_prof.bucket_assignment import EACH_ALONE, assign_buckets, assign_by_readiness
from ddp_prof.ddp.base import DataParallel, Layouts, add_hooks, has_hook_before
from ddp_prof.ddp.buckets import cap_in_bytes
from ddp_prof.ddp.collective import broadcast_buffers, broadcast_state, current_device, global_rank
from ddp_prof.ddp.reducer import Reducer
from ddp_prof.errors import CommunicationError

WRAP_AGAIN = "call remove() and wrap the module again"


class ReducingVariant(DataParallel):
    """A variant that reduces its gradients itself: after backward if :attr:`is_blocking`, else from gradient hooks.

    Args:
        module: The model. The model and the options must be the same on all ranks; this is checked.
        process_group: The ranks that train together; ``None`` is torch's default group.
        find_unused_parameters: In each step the ranks tell each other which parameters they used, by one small
            all-reduce. The host waits for its result, on a GPU thus until backward and communication are done. Only
            with this option may late gradients (see :mod:`ddp_prof.ddp.reducer`) occur on some ranks and not on others.
        broadcast_buffers: Copy the model's buffers (for example the running statistics of batch normalisation) from
            rank 0 before the first forward, and again before the forward that follows a synchronized forward (one with
            gradients, outside of ``no_sync``), as torch's DDP does.
        schedule: Options of a subclass that determine what is communicated, and when, by name. They are only compared
            between the ranks.
    """

    _not_copied: ClassVar[frozenset[str]] = DataParallel._not_copied | {
        *("_reducer", "_remover", "_structure", "_layouts", "_postponed", "_is_stepping", "_last_ready")
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
        _refuse_scaled_rows(module)
        broadcast_state(module, process_group)
        self._trained = self.trained_parameters()
        self.assignment = assign_buckets(self._trained, self._cap_bytes)
        self._find_unused = find_unused_parameters
        self._broadcast_buffers = self._are_buffers_due = broadcast_buffers
        self._frozen = [each for each in module.named_parameters() if not each[1].requires_grad]
        self._set_up()

    def _set_up(self) -> None:
        """Create the attributes that a copy does not take over: buckets, hooks, and the state of the current step."""
        super()._set_up()
        self._reducer = self._make_reducer()
        self._remover = add_hooks(self, self._trained)
        self._stepped = frozenset(map(id, self.optimizer_parameters()))
        self._structure: Structure | None = None
        self._layouts = Layouts(self.module)
        # ``_gradients_seen`` at the last ``finish_gradient_synchronization`` within ``no_sync``, which was postponed.
        self._postponed: list[tuple[int, int] | None] | None = None
        self._is_stepping = False  # whether an optimizer's step runs, in which a closure may call forward and backward
        # The parameter that a hook reported last, with the number of its backward.
        self._last_ready: tuple[int, torch.Tensor] | None = None

    def _make_reducer(self) -> Reducer:
        return self._reducer_type(self._trained, self.assignment, self.process_group, self._find_unused)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with the buffers of rank 0 if they are due.

        Raises CommunicationError if the model has changed since the variant was made: a parameter was added, unfrozen,
        converted or moved.
        """
        if torch.is_grad_enabled():
            self._forget_dropped()
        if self._are_buffers_due and (buffers := list(self.module.buffers())):
            if self.is_unfinished and not self.is_blocking:
                # The backward before may have launched other numbers of buckets on other ranks.
                self._reducer.launch_all()
            broadcast_buffers(buffers, self.process_group)
        is_trained = self._is_synchronizing and torch.is_grad_enabled()
        if is_trained:
            self._check_model()
        self._are_buffers_due = is_trained and self._broadcast_buffers
        return super().forward(*args, **kwargs)

    def on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Give the gradient of trained parameter ``index``, which backward has just finished, to the reducer.

        Called by the parameter's hook. A blocking variant leaves this to the end of backward. Raises CommunicationError
        if a hook of the program took the gradient away.
        """
        if not self._is_synchronizing:
            self._reducer.ready_alone(index)
            return
        self._check_kept(parameter)
        self.is_unfinished = True
        if not self.is_blocking:
            self._reducer.ready(index)

    def _check_kept(self, parameter: torch.Tensor) -> None:
        """Raise CommunicationError if the program's hooks have used up a gradient of this rank, as by a step of theirs.

        If they run before the hook of this variant, it is seen at once. If after it, a blocking variant sees it with
        the next gradient of the backward; of others the gradient is a placeholder by then, which cannot be read.
        """
        task, last = torch._C._current_graph_task_id(), self._last_ready
        is_last_gone = self.is_blocking and last is not None and last[0] == task >= 0 and last[1].grad is None
        is_missing = parameter.grad is None  # without another hook, autograd itself had no gradient for it
        if is_last_gone or (is_missing and has_hook_before(parameter)):
            raise CommunicationError(
                "a hook has taken a gradient away within backward, before the ranks have averaged it, as an optimizer "
                "in backward does: step after finish_gradient_synchronization()"
            )
        if not is_missing:
            self._last_ready = task, parameter

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Do a postponed synchronization; raise CommunicationError if gradients are not synchronized.

        Called by a hook before a step of any optimizer; does nothing for an optimizer of other parameters.
        """
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
        """Note that this variant's optimizer has stepped. Called by a hook after a step of any optimizer."""
        if self._is_own(optimizer):
            self._is_stepping = False

    def _postpone(self) -> None:
        """Synchronize later, when the optimizer steps: only that shows that this was the last micro-batch.

        Within the closure of a step nothing else would trigger the synchronization, so it is done at once.
        """
        if self._is_stepping:
            self._finish()
        else:
            self._postponed = self._gradients_seen()

    def _catch_up(self) -> None:
        """Do a postponed synchronization, if there is one; raise CommunicationError if gradients changed since."""
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
        """Return the identity and the version of each gradient: both stay the same until the gradient is changed."""
        gradients = (parameter.grad for parameter in self._trained)
        return [None if each is None else (id(each), each._version) for each in gradients]

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer steps on at least one parameter of this variant."""
        return any(id(parameter) in self._stepped for group in optimizer.param_groups for parameter in group["params"])

    def remove(self) -> None:
        self._remover()

    def kept_tensors(self) -> list[torch.Tensor]:
        return [view for bucket in self._reducer.buckets for view in bucket.views]

    def _synchronize(self) -> None:
        self._check_model()  # again, as the program may have called the module instead of the variant
        self._reducer.finish()

    def _forget_dropped(self) -> None:
        """End a step whose gradients ``zero_grad`` dropped; its collectives still run, as other ranks take part."""
        if self.is_unfinished and self._reducer.is_dropped():
            self.is_unfinished = False
            with annotate.synchronize():
                self._reducer.finish(is_discarded=True)

    def _check_model(self) -> None:
        """Raise CommunicationError if a parameter was converted, moved, unfrozen or added; repair moved buffers."""
        self._layouts.check()
        self._reducer.restore_memory()
        # Parameters that were frozen must still be frozen: they have no bucket.
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise CommunicationError(
                    f"parameter {name!r} was frozen when the variant was made and requires a gradient now: {WRAP_AGAIN}"
                )
        # Looking for new parameters is slow, so it is done only if modules or parameters changed since the last time.
        if self._structure is not None and self._structure.is_unchanged():
            return
        # Tensors that stand for parameters during a ``functional_call`` are the program's own.
        known = {id(parameter) for parameter in self._trained}
        for name, parameter in self.module.named_parameters():
            is_own = isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
            if is_own and id(parameter) not in known:
                raise CommunicationError(
                    f"parameter {name!r} was added to the model after the variant was made: {WRAP_AGAIN}"
                )
        self._structure = Structure(self.module)


def _refuse_scaled_rows(module: torch.nn.Module) -> None:
    """Raise CommunicationError if an embedding changes its weight in forward, on each rank by the samples there."""
    for name, layer in module.named_modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.max_norm is not None:
            raise CommunicationError(
                f"{f'{name}.weight'.lstrip('.')!r} is of an embedding with max_norm, which scales rows in forward, on "
                "each rank those of its own samples: leave max_norm out, and scale rows after the step"
            )


class Structure:
    """The submodules and parameters that a module has now, with a fast check whether they are still the same."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._holders: list[Any] = [held for layer in module.modules() for held in (layer._parameters, layer._modules)]
        self._objects = [*self._iterate_objects()]  # kept, so that their ids are not used again for other objects
        self._ids = [*map(id, self._objects)]

    def is_unchanged(self) -> bool:
        return self._ids == [*map(id, self._iterate_objects())]

    def _iterate_objects(self) -> Iterator[object]:
        # ``dict.values``, because the ``values`` of ``sharded`` waits until the parameters may be read. Modules of
        # TorchScript have no dictionaries, but objects like them.
        return chain.from_iterable(
            dict.values(held) if isinstance(held, dict) else held.values() for held in self._holders
        )


class NaiveDDP(ReducingVariant):
    """Naive: after backward, one blocking all-reduce per parameter, the last parameter first.

        host      |  forward  |     backward     |           synchronize           |optimizer|
        compute   |###########|##################|                                 |#########|
        all-reduce                               |[p9]|[p8]|[p7]| ... |[p1]|[p0]   |

    Communication does not overlap with compute, and each parameter costs the latency of a collective. Arguments as in
    :class:`ReducingVariant`.
    """

    is_blocking: ClassVar[bool] = True
    _cap_bytes = EACH_ALONE

    def _synchronize(self) -> None:
        self._check_model()
        for _ in self._reducer.buckets:
            self._reducer.launch_next().wait()
        self._reducer.finish()


class FlatDDP(ReducingVariant):
    """Flat: after backward, one all-reduce of one flat buffer per data type and device.

        host      |  forward  |     backward     |      synchronize      |optimizer|
        compute   |###########|##################|                       |#########|
        all-reduce                               |[ p9 p8 p7 ... p1 p0 ] |

    Communication does not overlap with compute, but the latency of a collective occurs only once per buffer. Arguments
    as in :class:`ReducingVariant`.
    """

    is_blocking: ClassVar[bool] = True


class OverlapDDP(ReducingVariant):
    """Overlap: one asynchronous all-reduce per parameter, launched by its gradient hook while backward goes on.

        host      |  forward  |     backward     |synchronize|optimizer|
        compute   |###########|##################|           |#########|
        all-reduce                [p9] [p8] [p7] ... [p1][p0]|

    All ranks launch in the same order, the last parameter first: a gradient that is ready early waits for its turn.
    ``synchronize`` launches what is left (zeros for unused parameters) and waits for all. What runs after backward does
    not overlap with compute. Each parameter still costs the latency of a collective. Arguments as in
    :class:`ReducingVariant`.
    """

    _cap_bytes = EACH_ALONE


class BucketedDDP(ReducingVariant):
    """Bucketed: one asynchronous all-reduce per bucket, launched by the gradient hook that fills the bucket.

        host      |  forward  |     backward     |synchronize|optimizer|
        compute   |###########|##################|           |#########|
        all-reduce                  [p9 p8 p7][p6 p5 p4] ... [p1 p0]   |

    Few large messages use the network better than many small ones. But the first message then starts later, and the
    last message, which no compute can hide, takes longer. The cap of a bucket sets the balance. With
    ``rebuild_buckets`` the first step shows in which order gradients become ready, and buckets are assigned again in
    that order. Two buckets before and after that, if the gradient of parameter 7 is ready last:

        order of parameters()   [p9 p8 p7]  [p6 p5 p4]      both buckets wait for p7, as launches keep their order
        order of readiness      [p9 p8 p6]  [p5 p4 p7]      only the second bucket waits for p7

    Args:
        bucket_size_mb: The most MiB that a bucket holds, as torch's ``bucket_cap_mb``; a larger parameter has its own
            bucket. A sequence holds the caps of the first buckets, and its last number is the cap of all further
            buckets: with ``[1, 25]`` a small first bucket is launched early, as by default in torch's DDP. ``None``:
            one bucket per data type and device.
        rebuild_buckets: After the first step in which every parameter had a gradient on rank 0, assign the parameters
            to buckets again, in the order in which gradients became ready on rank 0.
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
        """Assign buckets in the order in which gradients became ready on rank 0, so that all ranks agree.

        Does nothing if a parameter had no gradient on rank 0 in this step; the next step tries again.
        """
        order = [self._reducer.order]
        with current_device(self.device):
            dist.broadcast_object_list(order, global_rank(0, self.process_group), self.process_group)
        if len(order[0]) < len(self._trained):
            return
        self.assignment = assign_by_readiness(self._trained, self._cap_bytes, order[0])
        self._reducer = self._make_reducer()
        self._is_rebuild_due = False
