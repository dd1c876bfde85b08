"""The commands that lead from one format to another, or put what a checkpoint has beside its state into a directory; and their arguments."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainfold.adapters.cli.terminal.given_options import CheckpointPath, Components, Json
from trainfold.adapters.cli.terminal.output import deliver

AnyPath = Annotated[
    Path,
    Parameter(
        help="A checkpoint or run, a directory of a model hub or of torch.distributed.checkpoint, or a file of weights."
    ),
]
Key = Annotated[
    str | None,
    Parameter(
        help="In what torch has written: the keys under which the model is, such as state_dict; '' if its names are at the top."
    ),
]
NewPath = Annotated[
    Path,
    Parameter(help="The path that is written. It does not exist yet, or was begun or written by the same command."),
]


def convert(  # noqa: PLR0913 - one for each option
    src: AnyPath,
    dst: NewPath,
    *,
    to: Annotated[str, Parameter(help="The format to write: native, hf or dcp.")],
    dtype: Annotated[
        str | None, Parameter(help="Cast floating weights, such as to bf16. The optimizer is left out then.")
    ] = None,
    rules: Annotated[
        str | None,
        Parameter(
            help="Translate names and layouts between the code of a family, such as llama, and the hub; transformers, for mixtures of experts in its modules; or package.module:name, a transform or converter of your own. The optimizer is left out then."
        ),
    ] = None,
    like: Annotated[
        Path | None,
        Parameter(
            help="The directory of the original model, or its config.json: it has the numbers that --rules needs, and what a hub has beside the weights. By default SRC, if it is one of a hub."
        ),
    ] = None,
    lora: Annotated[
        Path | None,
        Parameter(
            help="Merge an adapter of peft: its adapter_config.json if SRC has its tensors, or else its directory. The optimizer is left out then."
        ),
    ] = None,
    dequantise: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Multiply quantised weights by their scales, as the config.json of the model says. The optimizer is left out then.",
        ),
    ] = False,
    source_format: Annotated[
        str | None,
        Parameter(
            name="--from", help="The format of SRC, if it shows two: native, hf, safetensors, dcp, torch or accelerate."
        ),
    ] = None,
    key: Key = None,
    dry_run: Annotated[bool, Parameter(negative=(), help="Print the plan, and write nothing.")] = False,
    json: Json = False,
) -> int:
    """Write a checkpoint in another format, a tensor at a time.

    SRC can be the URL of a run or checkpoint in a bucket; so can DST, with --to native. If it is killed, the same command goes on where it stopped; into a bucket it starts again from the beginning. Until the end nothing is at DST that can be taken for a whole checkpoint.
    What cannot be written is left out, and the plan and the result list it.

    Example: trainfold convert models/llama runs/start --to native --rules llama --dtype bf16
    """
    from trainfold.adapters.cli.formats.convert import convert_path

    return deliver(
        lambda: convert_path(
            src,
            dst,
            to=to,
            dtype=dtype,
            rules=rules,
            like=like,
            lora=lora,
            dequantise=dequantise,
            asked=source_format,
            key=key,
            dry_run=dry_run,
        ),
        as_json=json,
    )


def link(
    src: AnyPath,
    dst: NewPath,
    *,
    like: Annotated[
        Path | None,
        Parameter(
            help="The directory of the original model, or its config.json, for what a hub has beside the weights."
        ),
    ] = None,
    dry_run: Annotated[bool, Parameter(negative=(), help="Print what would be linked, and make nothing.")] = False,
    json: Json = False,
) -> int:
    """Show a checkpoint as a directory of a model hub, or such a directory as a checkpoint, without copying tensors.

    The files get second names (hard links), which buckets do not have, and are made read-only: whatever is written into one is written into both. Deleting one name keeps the other.
    What would need other bytes, such as other names or dtypes, or parts of several ranks, is refused: `convert` copies it.

    Example: trainfold link runs/a/step-00010000 models/a --like models/base
    """
    from trainfold.adapters.cli.formats.link import link_path

    return deliver(lambda: link_path(src, dst, like=like, dry_run=dry_run), as_json=json)


def files(
    checkpoint: CheckpointPath,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            help="Put them into this new directory, as component/name; without it they are listed.",
        ),
    ] = None,
    components: Components = None,
    json: Json = False,
) -> int:
    """List the files that belong to a checkpoint, such as its tokenizer, or put them into a directory.

    The directory is absent until it is whole. Nothing is overwritten.

    Example: trainfold files runs/a/step-00000120 -o restored
    """
    from trainfold.adapters.cli.formats.put_files import files_of_checkpoint

    return deliver(lambda: files_of_checkpoint(checkpoint, directory=output, components=components), as_json=json)
