"""What the path of a leaf says about two runs that part: a seed, a random stream, a schedule, the position in the data."""

import re
from collections.abc import Iterable
from typing import Final

from trainfold.core.flight.causes.evidence import LeafApart

_RANK: Final = r"(?:@rank\d+)?"
_SEED: Final = re.compile(rf"rng{_RANK}\.(value\['seed'\]|bits)")
_HOST: Final = re.compile(rf"(rng|dataset){_RANK}\..*\['(python|numpy)'\]")
_DRAWS: Final = re.compile(rf"dataset{_RANK}\.value\['draws'\]")
_WORKERS: Final = re.compile(rf"dataset{_RANK}\.value\['draws'\]\['count'\]")
_ORDER: Final = re.compile(rf"dataset{_RANK}\.value\['order'\]")
_POSITION: Final = re.compile(rf"trainer\.(epoch|samples)|dataset{_RANK}\.value\['(epoch|samples|batches)'\]")
_GENERATOR: Final = re.compile(r"(.*)\.value\['(kind|state)'\]")
_COUNTS: Final = re.compile(r".*\['(last_epoch|_step_count)'\]")
_SCHEDULED: Final = re.compile(r".*\.groups\[\d+\]\.hyper\['(lr|initial_lr|momentum|betas|weight_decay|eps|alpha|rho|lambd|dampening|nesterov|amsgrad)'\]|scheduler.*\['_last_lr'\]")  # fmt: skip
_UPDATES: Final = re.compile(r".*\.slots\[.*\]\['step'\]")
_MEASURED: Final = re.compile(r"scheduler.*\['(best|num_bad_epochs|cooldown_counter)'\]")


def is_seed(path: str) -> bool:
    """Whether a leaf is the seed of torch's streams, or the key of a state made by `init_state`.

    Examples:
        >>> is_seed("rng.value['seed']"), is_seed("rng@rank1.bits"), is_seed("rng.value['torch']")
        (True, True, False)
    """
    return bool(_SEED.fullmatch(path))


def host_stream(path: str) -> str:
    """Whose stream a leaf holds, ``python`` or ``numpy``, which programs seldom seed; empty for any other leaf.

    Examples:
        >>> host_stream("rng.value['numpy']['state']['key']"), host_stream("rng.value['torch']")
        ('numpy', '')
    """
    found = _HOST.match(path)
    return found[2] if found else ""


def is_draw(path: str) -> bool:
    """Whether a leaf says what a loader has drawn ahead, which its number of workers changes, and nothing else."""
    return bool(_DRAWS.match(path))


def is_count_of_workers(path: str) -> bool:
    """Whether a leaf is the number of workers of a loader."""
    return bool(_WORKERS.fullmatch(path))


def is_order(path: str) -> bool:
    """Whether a leaf is of the random streams with which a loader began its order."""
    return bool(_ORDER.match(path))


def is_stream(path: str) -> bool:
    """Whether a leaf is of torch's random streams, or of those of a loader."""
    return is_rng(path) or is_order(path)


def is_rng(path: str) -> bool:
    """Whether a leaf is of the random streams of the program."""
    return path.startswith(("rng.", "rng@"))


def is_position(path: str) -> bool:
    """Whether a leaf is of the position in the data.

    Examples:
        >>> is_position("dataset@rank0.value['samples']"), is_position("trainer.step")
        (True, False)
    """
    return bool(_POSITION.match(path))


def generators(paths: list[str], unlike: list[str]) -> tuple[str, ...]:
    """The components that are random generators of the program's own, and elsewhere.

    Args:
        paths: all leaves.
        unlike: those that differ.

    Examples:
        >>> generators(["noise.value['kind']", "noise.value['state']"], ["noise.value['state']"])
        ('noise',)
    """
    whole: dict[str, bool] = {}
    for path in paths:
        name = path.partition(".")[0]
        whole[name] = whole.get(name, True) and bool(_GENERATOR.match(path))
    return tuple(dict.fromkeys(name for path in unlike if whole.get(name := path.partition(".")[0])))


def scheduled(paths: Iterable[str]) -> tuple[str, ...]:
    """The leaves that a schedule sets, first those that explain the others; a learning rate is one of them."""
    given = tuple(paths)
    return tuple(path for kind in (_SCHEDULED, _COUNTS) for path in given if kind.match(path))


def counts_of_updates(leaves: Iterable[LeafApart]) -> tuple[str, ...]:
    """The counters of an optimizer, of the updates of each parameter, that differ by whole updates.

    Examples:
        >>> counts_of_updates([LeafApart("optimizer.slots['w']['step']", size=1.0), LeafApart("optimizer.slots['w']['exp_avg']", size=1.0)])
        ("optimizer.slots['w']['step']",)
    """
    return tuple(leaf.path for leaf in leaves if _UPDATES.fullmatch(leaf.path) and leaf.size and leaf.size.is_integer())


def follows_results(leaves: tuple[LeafApart, ...]) -> bool:
    """Whether a scheduler that looks at results got other ones, so that its learning rates say nothing about a setting."""
    return any(_MEASURED.match(leaf.path) for leaf in leaves) and not any(_COUNTS.match(leaf.path) for leaf in leaves)
