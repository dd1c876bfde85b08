"""`StepWorkspace`: the mutable objects that one step in flight computes with, and the pool that they wait in."""

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, final

import torch

from trainfold.core import tree
from trainfold.core.optim.optimizer import Optimizer
from trainfold.core.state.aliasing import check_apart
from trainfold.core.state.leaves import Lease, Leaves
from trainfold.core.state.state import ModelState, OptimizerState, TrainState
from trainfold.core.step.engine.grad_norm import Norm
from trainfold.core.step.engine.module_template import ModuleSpec

_FIX = "give each leaf a storage of its own (clone one of them), or make the step with donate=False"


@final
class StepWorkspace:
    """A template of the model and a bound optimizer.

    While a chain of donated states flows through it, the same tensors stay bound, and no leaf is visited in Python.
    """

    def __init__(self, spec: ModuleSpec, optimizer: Any) -> None:
        self.template = spec.cast()
        if not self.template.module.training:  # elsewhere a frozen normalisation, say, is in eval mode on purpose
            self.template.module.train()
        self.bound = optimizer.bound_to(self.template.params) if isinstance(optimizer, Optimizer) else None
        self.targets = list((self.template.params if self.bound is None else self.bound.targets).values())
        self.norm = Norm(self.targets)
        self.watch: weakref.ref[Lease] | None = None
        self._seen_extra: object = None

    def holds(self, state: TrainState) -> bool:
        """Whether the state's tensors are the ones that are bound."""
        assert state.model is not None
        return self.template.holds(state.model) and (self.bound is None or self.bound.holds(state.optimizer))

    def check_apart(self, state: TrainState) -> None:
        """Check a state that is new here, or whose extra components are, before it is written to.

        Raises:
            SharedStorage: if two leaves of it share storage.
        """
        if not self.holds(state):
            written = [
                *tree.named_leaves(state.model, "state.model"),
                *tree.named_leaves(state.optimizer, "state.optimizer"),
            ]
            check_apart(_tensors(written), _tensors(tree.named_leaves(state.extra, "state.extra")), fix=_FIX)
        elif state.extra is not self._seen_extra and state.extra:
            self._check_extra(state.extra)
        self._seen_extra = state.extra

    def enter(self, state: TrainState) -> None:
        """Bind the state's own tensors, which the step will write to.

        Raises:
            SpecMismatch: if they are not the model's.
            InvalidState: if the optimizer's are not.
        """
        model = state.model
        assert model is not None
        if not self.holds(state):
            self.template.bind(model.params.alive(), model.buffers.alive(), model.ties)
            if self.bound is not None:
                self.bound.bind(state.optimizer)
        elif self.bound is not None:
            self.bound.use_groups(state.optimizer.groups)

    def gather(self) -> None:
        """After a backward: gradients of low-precision parameters go to their masters."""
        if self.bound is not None:
            self.bound.gather()

    def undo(self) -> None:
        """Leave the bound tensors as they were before the forward."""
        self.template.undo()
        for target in self.targets:
            target.grad = None

    def collect(self, state: TrainState, lease: Lease) -> tuple[ModelState, OptimizerState]:
        """The new model and optimizer state, after the update."""
        assert state.model is not None
        assert self.bound is not None
        buffers = self.template.harvest()
        params = self.template.bound_params()
        for target in self.targets:
            target.grad = None
        # a fused optimizer on a CPU moves no version counter, and a graph that reads these tensors must not run now
        torch.autograd.graph.increment_version(params.values())
        model = ModelState(Leaves.leased(params, lease), Leaves.leased(buffers, lease), state.model.ties)
        return model, self.bound.collect(lease)

    def release(self) -> None:
        """Let go of every tensor of the state."""
        self.watch = self._seen_extra = None
        self.template.release()
        if self.bound is not None:
            self.bound.release()

    def _check_extra(self, extra: Any) -> None:
        """A cheap form of the check, for components that change from step to step, such as a moving average."""
        starts = {value.data_ptr(): name for name, value in self.template.bound_params().items()}
        for path, leaf in _tensors(tree.named_leaves(extra, "state.extra")):
            if leaf.data_ptr() in starts:
                name = f"state.model.params[{starts[leaf.data_ptr()]!r}]"
                check_apart([(name, leaf)], [(path, leaf)], fix=_FIX)


@final
class WorkspacePool:
    """Idle workspaces; each step in flight uses its own.

    Args:
        spec: of the model.
        optimizer: of the step.
    """

    def __init__(self, spec: ModuleSpec, optimizer: Any) -> None:
        self._spec = spec
        self._optimizer = optimizer
        self._idle: list[StepWorkspace] = []
        self._lock = threading.RLock()  # a lease may die, and so call back, at any moment in any thread

    @contextlib.contextmanager
    def workspace(self, state: TrainState) -> Iterator[StepWorkspace]:
        """A workspace for one step: the one that holds the state already, where there is one.

        Whatever fails in the block, nothing of it stays in the workspace: no gradient, no buffer, no binding.
        """
        with self._lock:
            index = next((i for i, workspace in enumerate(self._idle) if workspace.holds(state)), -1)
            workspace = self._idle.pop(index) if self._idle else None
        workspace = workspace or StepWorkspace(self._spec, self._optimizer)
        try:
            yield workspace
        except BaseException:
            workspace.undo()
            workspace.release()
            raise
        finally:
            with self._lock:
                self._idle.append(workspace)

    def watch(self, workspace: StepWorkspace, lease: Lease) -> None:
        """Keep a workspace bound for as long as somebody has the state, so that an idle one holds no memory."""
        # bound here: when Python ends, this module's names may be gone before the lease is
        is_ending = sys.is_finalizing

        def let_go(reference: weakref.ref[Lease]) -> None:
            if is_ending():
                return
            with self._lock:
                if workspace in self._idle and workspace.watch is reference:
                    workspace.release()

        workspace.watch = weakref.ref(lease, let_go)


def _tensors(named: list[tuple[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    return [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor)]
