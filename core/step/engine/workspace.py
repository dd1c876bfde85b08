"""`StepWorkspace`: the mutable working objects of one step in flight, and the pool of idle ones."""

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch

from trainfold.core import tree
from trainfold.core.state.aliasing import check_apart
from trainfold.core.state.leaves import Lease, Leaves
from trainfold.core.state.state import ModelState, OptimizerState, TrainableState, TrainState
from trainfold.core.step.engine.grad_norm import Norm
from trainfold.core.step.engine.module_template import ModuleSpec
from trainfold.core.step.optimizer import Optimizer
from trainfold.core.step.rows.parts import in_parts
from trainfold.core.step.rows.sharded import Sharded

_FIX = "give each leaf its own storage (clone one of them), or make the step with donate=False"


@final
class StepWorkspace:
    """A template of the model and a bound optimizer.

    Along a chain of donated states the same tensors stay bound, so that a step visits no leaf in Python.

    Args:
        spec: the structure of the model.
        optimizer: the step's.
        cut: the ranks, if each steps only its rows; the template then computes with gathered parameters.

    Attributes:
        targets: what the optimizer steps.
        summed: what a backward gives gradients: the targets, or the gathered parameters.
    """

    def __init__(self, spec: ModuleSpec, optimizer: Any, cut: Sharded | None = None) -> None:
        self.template = spec.template()
        # a model in training mode may have submodules in eval mode on purpose, such as a frozen normalisation
        if not self.template.module.training:
            self.template.module.train()
        self._cut = cut
        whole = self.template.params
        self._stepped = whole if cut is None else {name: _rows_like(each) for name, each in whole.items()}
        self._rows: dict[str, torch.Tensor] = {}
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self.bound = optimizer.bound_to(self._stepped) if isinstance(optimizer, Optimizer) else None
        self.targets = list((self._stepped if self.bound is None else self.bound.targets).values())
        self.summed = self.targets if cut is None else list(whole.values())
        self.norm = Norm(self.targets)
        self.watch: weakref.ref[Lease] | None = None
        self._seen_extra: object = None

    def holds(self, state: TrainState) -> bool:
        """Whether the state's tensors are bound."""
        assert state.model is not None
        return self.template.holds(state.model) and (self.bound is None or self.bound.holds(state.optimizer))

    def check_apart(self, state: TrainState) -> None:
        """Check a state before it is written to, if its tensors or its extra components are new to this workspace.

        Raises:
            SharedStorage: if two of its leaves share storage.
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
        """Bind the state's own tensors; the step writes to them.

        Raises:
            SpecMismatch: if the model component does not fit the model.
            InvalidState: if the optimizer component does not fit the optimizer.
        """
        model = state.model
        assert model is not None
        if not self.holds(state):
            self.template.bind(model.params.alive(), model.buffers.alive(), model.ties)
            if self.bound is not None:
                self.bound.bind(state.optimizer)
        elif self.bound is not None:
            self.bound.use_groups(state.optimizer.groups)

    def enter_rows(self, state: TrainableState, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Bind this rank's rows, and compute with the parameters that the ranks gather.

        Args:
            state: with this rank's rows as plain tensors.
            shapes: FQN -> shape of the whole parameter.

        Raises:
            SpecMismatch: if the model component does not fit the model.
            RanksDisagree: if the ranks have other parameters, or another step.
        """
        assert self._cut is not None
        assert self.bound is not None
        self._rows, self._shapes = state.model.params.alive(), shapes
        doing = f"gather the parameters of step {state.trainer.step}"
        whole = self._cut.gathered(self._rows, shapes, doing=doing)
        self.template.bind(whole, state.model.buffers.alive(), state.model.ties)
        for name, each in self._stepped.items():
            each.data = self._rows[name]
        self.bound.bind(state.optimizer)

    def sum_rows(self, step: int) -> None:
        """Sum this rank's rows of the gradients over the ranks, and release the whole ones.

        Args:
            step: for the error if a rank does something else.
        """
        assert self._cut is not None
        grads = {name: each.grad for name, each in self.template.params.items() if each.grad is not None}
        self.template.drop_grads()
        sums = self._cut.summed_rows(grads, doing=f"sum the gradients of step {step}")
        for name, rows in sums.items():
            self._stepped[name].grad = rows

    def gather(self) -> None:
        """Move the gradients of low-precision parameters to their masters, after a backward."""
        if self.bound is not None:
            self.bound.gather()

    def undo(self) -> None:
        """Restore the bound tensors to their values before the forward."""
        self.template.undo()
        for target in self.targets:
            target.grad = None

    def collect(self, state: TrainState, lease: Lease) -> tuple[ModelState, OptimizerState]:
        """Return the new model and optimizer components, after the update."""
        assert state.model is not None
        assert self.bound is not None
        buffers = self.template.harvest()
        params = self.template.bound_params() if self._cut is None else self._rows
        for target in self.targets:
            target.grad = None
        # a fused optimizer on a CPU increments no version counter; a graph that reads these tensors must fail, not run
        torch.autograd.graph.increment_version(params.values())
        model = ModelState(Leaves.leased(params, lease), Leaves.leased(buffers, lease), state.model.ties)
        optimizer = self.bound.collect(lease)
        return (
            (model, optimizer) if self._cut is None else in_parts(model, optimizer, self._shapes, self._cut.part, lease)
        )

    def release(self) -> None:
        """Release every tensor of the state."""
        self.watch = self._seen_extra = None
        self.template.release()
        if self.bound is not None:
            self.bound.release()
        if self._cut is not None:
            self._rows = {}
            for each in self._stepped.values():
                each.grad, each.data = None, torch.empty(0, dtype=each.dtype, device=each.device)

    def _check_extra(self, extra: Any) -> None:
        """A cheap form of the check for components that change at each step, such as a moving average."""
        starts = {value.data_ptr(): name for name, value in self.template.bound_params().items()}
        for path, leaf in _tensors(tree.named_leaves(extra, "state.extra")):
            if leaf.data_ptr() in starts:
                name = f"state.model.params[{starts[leaf.data_ptr()]!r}]"
                check_apart([(name, leaf)], [(path, leaf)], fix=_FIX)


@final
class WorkspacePool:
    """Idle workspaces; each step in flight uses its own.

    Args:
        spec: the structure of the model.
        optimizer: the optimizer of the step.
        cut: the ranks, if each steps only its rows.
    """

    def __init__(self, spec: ModuleSpec, optimizer: Any, cut: Sharded | None = None) -> None:
        self._spec = spec
        self._optimizer = optimizer
        self._cut = cut
        self._idle: list[StepWorkspace] = []
        self._lock = threading.RLock()  # a lease may die, and call back, at any time in any thread

    @contextlib.contextmanager
    def workspace(self, state: TrainState) -> Iterator[StepWorkspace]:
        """Take a workspace for one step, preferably the one that already has the state bound.

        If the block raises, the workspace keeps nothing of it: no gradient, no buffer, no binding.
        """
        with self._lock:
            index = next((i for i, workspace in enumerate(self._idle) if workspace.holds(state)), -1)
            workspace = self._idle.pop(index) if self._idle else None
        workspace = workspace or StepWorkspace(self._spec, self._optimizer, self._cut)
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
        """Keep a workspace bound while the state is alive, so that an idle workspace keeps no memory alive."""
        # bound here: at exit, Python may clear this module's names before the lease dies
        is_ending = sys.is_finalizing

        def release(reference: weakref.ref[Lease]) -> None:
            if is_ending():
                return
            with self._lock:
                if workspace in self._idle and workspace.watch is reference:
                    workspace.release()

        workspace.watch = weakref.ref(lease, release)


def _rows_like(whole: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(0, dtype=whole.dtype, device=whole.device), requires_grad=whole.requires_grad)


def _tensors(named: list[tuple[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    return [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor)]
