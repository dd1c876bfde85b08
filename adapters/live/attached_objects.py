"""`AttachedObjects`: the objects of a live run, each with the component adapter that reads and writes it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch

from trainfold.adapters.batches.loader_extras import is_loader_extra
from trainfold.adapters.components.component import ComponentAdapter, ObjectPart, Stateful, TreePart
from trainfold.adapters.components.held_optimizers import Attached
from trainfold.adapters.components.module import ModulePart
from trainfold.adapters.components.optimizer import OptimizerPart
from trainfold.adapters.components.own_modules import OwnModulePart, late_owner_problems, own_module_parts
from trainfold.adapters.components.scheduler import SchedulerPart, check_schedulers
from trainfold.adapters.live.module_parts import check_uncounted
from trainfold.adapters.parallel.end_together import Uneven
from trainfold.adapters.parallel.pipelines.pipeline import PipelineParallelism, PipelineStage, noted_divisors, stage_of
from trainfold.adapters.parallel.share import PositionOfShare, known_share
from trainfold.adapters.parallel.sharing import Shared, Sharing
from trainfold.adapters.parallel.torch_parallelism import TrainingRanks
from trainfold.adapters.script.accelerate_wrappers import AccelerateWrappers, unwrapped, unwrapped_schedulers
from trainfold.adapters.sharded.dtensor import mesh_of, named_shards, reshard
from trainfold.adapters.sharded.whole import check_whole, wheres
from trainfold.adapters.streams.generator import GeneratorPart, is_generator
from trainfold.adapters.streams.rng_streams import RngPart, bound_device
from trainfold.backends.side.side_files import SideFiles
from trainfold.core import tree
from trainfold.core.checks import choice
from trainfold.core.errors import InvalidArgument, TrainfoldError
from trainfold.core.layout.parallelism import Parallelism
from trainfold.core.printable import with_article
from trainfold.core.state.components import components_of
from trainfold.core.state.fqn import NamedTensors, check_real
from trainfold.core.state.state import TrainState


@final
class AttachedObjects:
    """The model, the optimizer, the schedulers and the objects under ``extra``, with their names.

    Args:
        model: the module.
        optimizer: made from its parameters, or None.
        scheduler: one, or a tree of them, or None.
        extra: the other components, by name.
        sharing: what the ranks have in common, as it was declared.
        parallelism: how the ranks train; None for what torch has set up.
        uneven: what happens with batches that not every rank has.
        stages: of a pipeline on this rank; none for a whole model.

    Raises:
        InvalidArgument: for an object that cannot be attached, or a name that is taken.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        extra: Mapping[str, Any],
        *,
        sharing: Mapping[str, Shared] | None = None,
        parallelism: Parallelism | None = None,
        uneven: Uneven = "refuse",
        stages: Sequence[PipelineStage] = (),
    ) -> None:
        self.accelerated = AccelerateWrappers.among([optimizer, *extra.values()], extra.values())
        optimizer, scheduler = unwrapped(optimizer), unwrapped_schedulers(scheduler)
        extra = {name: unwrapped(each) for name, each in extra.items()}
        self.uneven: Uneven = choice("attach.uneven", uneven, ("refuse", "drop"), fix="pass one of these")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgument(
                "attach.optimizer",
                expected="a torch.optim.Optimizer",
                found=type(optimizer).__qualname__,
                fix="attach the optimizer itself, one for the parameters of all modules, and a wrapper's own state under extra=",
            )
        reshard(model, *(each for each in extra.values() if isinstance(each, torch.nn.Module)))
        check_real(model)
        check_whole(wheres(model, optimizer, extra))
        self.model = model
        self.optimizer = optimizer
        self.scheduler = None if scheduler is None else SchedulerPart(check_schedulers(scheduler))
        self.extra = extra
        self.stage = stage_of(stages)
        self._stage_modules = [each.submod for each in stages]
        check_uncounted(extra, self._stage_modules)
        around = partial(PipelineParallelism, stages, noted_divisors(stages)) if stages else None
        self.ranks = ranks = TrainingRanks(parallelism, model, self.extra, around=around)
        self.sharing = Sharing(sharing, objects=self._maybe_modules(), ranks=lambda: ranks.parallelism)
        self._as_attached = Attached()
        self._own_states = {name: own_module_parts(name, each) for name, each in self._maybe_modules().items()}
        components_of(TrainState(extra=self.extra))  # checks the names
        for name in set(self.own_states) & self.extra.keys():
            raise InvalidArgument(
                f"extra[{name!r}]",
                expected="a name that is free",
                found="the name of a component that an attached module adds",
                fix="choose another name",
            )

    # --- objects ------------------------------------------------------------------------------------------------------

    def attached(self) -> dict[str, Any]:
        """Every object by its component, without the schedulers."""
        found = {"model": self.model, "optimizer": self.optimizer, **self.extra}
        return {name: target for name, target in found.items() if target is not None}

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Every module, the model first."""
        return [each for each in self._maybe_modules().values() if isinstance(each, torch.nn.Module)]

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Every optimizer by its component."""
        return {name: each for name, each in self.attached().items() if isinstance(each, torch.optim.Optimizer)}

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers, as a list."""
        return [] if self.scheduler is None else tree.leaves(self.scheduler.schedulers)

    @property
    def named_schedulers(self) -> dict[str, Any]:
        """The schedulers by path."""
        return {} if self.scheduler is None else dict(tree.named_leaves(self.scheduler.schedulers, "scheduler"))

    @property
    def own_states(self) -> dict[str, OwnModulePart]:
        """What attached modules save beside their tensors, by component."""
        return {name: part for own in self._own_states.values() for name, part in own.items()}

    def shown(self, *, has_data: bool) -> list[str]:
        """Every component, with the class of its object.

        Args:
            has_data: whether a loader is attached.
        """
        main = {"model": self.model, "optimizer": self.optimizer}
        if self.scheduler is not None:
            main["scheduler"] = self.scheduler.schedulers
        found = [f"{name} ({type(each).__name__})" for name, each in main.items() if each is not None]
        found += ["trainer", *(["dataset"] if has_data else []), "rng"]
        return found + [f"{name} ({type(each).__name__})" for name, each in self.extra.items()]

    def _maybe_modules(self) -> dict[str, Any]:
        return {"model": self.model, **self.extra}

    # --- names --------------------------------------------------------------------------------------------------------

    def named(self) -> dict[str, NamedTensors]:
        """The tensors of the attached modules, by component."""
        return {
            name: named_shards(each)
            for name, each in self._maybe_modules().items()
            if isinstance(each, torch.nn.Module)
        }

    def names_of_parameters(self, named: Mapping[str, NamedTensors] | None = None) -> dict[int, str]:
        """``id(parameter)`` -> name, for the model and the modules under ``extra``.

        Args:
            named: as `named` returns it; None to read it now.
        """
        named = self.named() if named is None else named
        found = {id(value): name for name, value in named["model"].params.items()}
        for component, each in named.items():
            for name, value in each.params.items() if component != "model" else ():
                found.setdefault(id(value), f"{component}.{name}")
        return found

    # --- adapters -----------------------------------------------------------------------------------------------------

    def parts(
        self, named: Mapping[str, NamedTensors], *, dataset: ComponentAdapter | None, trainer: ComponentAdapter
    ) -> dict[str, ComponentAdapter]:
        """The components, in the order in which they are written: what may refuse comes first, random streams last.

        Args:
            named: as `named` returns it.
            dataset: the adapter of the data, if a loader is attached.
            trainer: the adapter of the counters.
        """
        names = self.names_of_parameters(named)
        extras = {name: self._part(name, target, names) for name, target in self.extra.items()}
        parts: dict[str, ComponentAdapter] = {
            n: part for n, part in extras.items() if isinstance(part, ObjectPart | TreePart)
        }
        if self.scheduler is not None:
            parts["scheduler"] = self.scheduler
        if dataset is not None:
            parts["dataset"] = PositionOfShare(dataset, self.ranks)
        if self.optimizer is not None:
            extras = {"optimizer": self._part("optimizer", self.optimizer, names), **extras}
        parts.update({n: part for n, part in extras.items() if isinstance(part, OptimizerPart) and part.has_own_way})
        extras["model"] = ModulePart(self.model)
        for name, own in self._own_states.items():
            if own:  # a module's own state comes after its weights, and may be refused
                parts[name] = ModulePart(self._maybe_modules()[name], name, can_undo=True)
                parts.update(own)
        parts.update({n: part for n, part in extras.items() if n not in parts})
        parts["trainer"] = trainer
        params = list(named["model"].params.values())
        parts["rng"] = RngPart(bound_device(params), mesh_of(params), partial(known_share, self.ranks))
        return self.sharing.parts(parts)

    def new_sharing(self, name: str, target: Any, declared: Mapping[str, Shared] | None) -> Sharing:
        """What was declared of an object that is not attached yet.

        Raises:
            InvalidArgument: for a declaration of something else, or a way that there is not.
        """
        ranks = self.ranks
        return Sharing(declared, objects={name: target}, ranks=lambda: ranks.parallelism)

    def new_parts(
        self, name: str, target: Any, named: Mapping[str, NamedTensors], sharing: Sharing
    ) -> dict[str, ComponentAdapter]:
        """The components that an object not attached yet would add.

        Raises:
            InvalidArgument: for a name or an object that cannot be attached.
        """
        components_of(TrainState(extra={name: target}))  # checks the name
        check_uncounted({name: target}, self._stage_modules)
        reshard(*([target] if isinstance(target, torch.nn.Module) else []))
        check_whole([(f"register({name!r})", target)])
        part = self._part(name, target, self.names_of_parameters(named))
        return sharing.parts({name: part, **own_module_parts(name, target)})

    def add(self, name: str, target: Any, parts: Mapping[str, ComponentAdapter], sharing: Sharing) -> None:
        """Attach one more object, with its components as `new_parts` returns them."""
        self.extra[name] = target
        self.sharing.add(sharing)
        self.ranks.registered()
        self._own_states[name] = {each: part for each, part in parts.items() if isinstance(part, OwnModulePart)}

    def optimizer_parts(self) -> dict[str, OptimizerPart]:
        """The adapters of the optimizers."""
        names = self.names_of_parameters()
        found = {name: self._part(name, target, names) for name, target in self.optimizers.items()}
        return {name: part for name, part in found.items() if isinstance(part, OptimizerPart)}

    def loader_extras(self) -> dict[str, ComponentAdapter]:
        """The components under ``extra`` that batches may be drawn from: neither modules nor optimizers."""
        plain = torch.nn.Module | torch.optim.Optimizer
        found = {name: self._part(name, each, {}) for name, each in self.extra.items() if not isinstance(each, plain)}
        return {name: part for name, part in found.items() if is_loader_extra(part)}

    def clear_gradients(self) -> None:
        """Clear the gradients of every module."""
        for module in self.modules:
            for parameter in module.parameters():
                parameter.grad = None

    def late_problems(self) -> list[TrainfoldError]:
        """Why a module's own state cannot be saved, if that shows only after the attach: for example, a hook was registered later."""
        return [
            problem
            for name, own in self._own_states.items()
            for problem in late_owner_problems(name, self.attached()[name], own)
        ]

    def check_whole(self) -> None:
        """Raise if an object keeps only a part of its state on each rank, but looks whole."""
        check_whole(wheres(self.model, self.optimizer, self.extra))

    def _part(self, name: str, target: Any, names: Mapping[int, str]) -> ComponentAdapter:
        if isinstance(target, torch.nn.Module):
            return ModulePart(target, name)
        if isinstance(target, torch.optim.Optimizer):
            return OptimizerPart(target, names, name, self._as_attached.of(name, target))
        if is_generator(target):
            return GeneratorPart(target, name)
        if isinstance(target, SideFiles):
            return target
        if isinstance(target, Stateful):
            return ObjectPart(target, name)
        if isinstance(target, tuple) and len(target) == 2 and all(callable(function) for function in target):
            return TreePart(*target, name)
        raise InvalidArgument(
            f"extra[{name!r}]",
            expected="a module, an optimizer, an object with state_dict and load_state_dict, or (get, set)",
            found=f"{with_article(type(target).__qualname__)}",
            fix="pass a pair of functions that return its tree and take it back",
        )
