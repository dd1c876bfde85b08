"""`SelectsComponents`: the part of a live run that knows which of its components are in checkpoints."""

from collections.abc import Iterable

from trainfold.adapters.outside.outside_weights import OutsideWeights
from trainfold.core.component_names import torn_pairs, validate_components, within
from trainfold.core.errors import InvalidArgument


class SelectsComponents:
    """A run that may have some of its components in checkpoints, and not all.

    Attributes:
        components: these, as given to `attach`; None for all.
        outside: what of the model comes from a source, and not from checkpoints; None for nothing.
    """

    components: tuple[str, ...] | None
    outside: OutsideWeights | None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components beside the built-in ones."""
        raise NotImplementedError

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the components that it has now."""
        raise NotImplementedError

    def selected(
        self, asked: Iterable[str] | None, *, where: str, others: Iterable[str] = ()
    ) -> tuple[str, ...] | None:
        """The components that are meant by a call.

        Args:
            asked: those that it names; None for all.
            where: the argument, for the message.
            others: names that the call may name too.

        Returns:
            Their names; None for all.

        Raises:
            UnknownComponent: for a name that no component has.
            InvalidArgument: for a component that the run has, but was attached without.
        """
        names = validate_components(asked, declared=(*self.names, *others), where=where)
        if names is None or self.components is None:
            return self.components if names is None else names
        return within(self.components, names, present=self.present, where=where)

    def check_may_register(self, name: str) -> None:
        """Raise if a component that is attached later would be in no checkpoint.

        Raises:
            InvalidArgument: naming it.
        """
        if self.components is not None:
            raise InvalidArgument(
                "register.name",
                expected=f"a component among those that the run was attached with, {list(self.components)}",
                found=name,
                fix="attach it under extra= and select it there, or select components in the manager and not in attach",
            )

    def check_selected(self, names: tuple[str, ...] | None, *, where: str, restores: bool = True) -> None:
        """Raise if checkpoints with these components alone could not continue the run.

        Args:
            names: as `selected` returns them.
            where: the argument, for the message.
            restores: whether the run continues from them; otherwise they may be an export beside whole checkpoints, of which only pairs are checked.

        Raises:
            InvalidArgument: if they have an optimizer without its scheduler, or the other way round, or if the model is in no checkpoint and comes
                from no source either.
        """
        if names is None:
            return
        for torn in torn_pairs(names, present=self.present, where=where):
            raise torn
        is_outside = self.outside is not None and self.outside.is_whole
        if "model" in names or is_outside or not restores or not {"trainer", "optimizer"} & {*names} & {*self.present}:
            return
        part = "" if self.outside is None else ": weights=Frozen(...) supplies the frozen parameters alone"
        raise InvalidArgument(
            where,
            expected="a model in the checkpoints, or a source of its weights",
            found=f"{sorted(names)}, and none{part}",
            fix="select model too; or name the source in attach(..., weights=...), which is trainfold.weights.ByScript() if the script has loaded "
            "them itself",
        )
