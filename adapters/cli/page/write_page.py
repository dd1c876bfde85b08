"""`trainfold page RUN -o run.html`: writes the page of a run into one file, atomically."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from trainfold.adapters.cli.page.gather import PageReader
from trainfold.adapters.cli.terminal.output import Answer, Table, UsageError
from trainfold.backends.stores.place import free_path
from trainfold.core.errors import InvalidArgument, NotWritable
from trainfold.core.page.document import BEGIN, page_html
from trainfold.core.page.sessions import sessions_of
from trainfold.core.printable import bytes_text


def page_command(run: Path, output: Path | None, *, serves: bool, port: int) -> Answer:
    """Write the page, or serve it.

    Raises:
        UsageError: for both, or neither; and as `serve_page` raises it.
        TrainfoldError: as `write_page` and `serve_page` raise it.
    """
    if serves is (output is not None):
        raise UsageError("trainfold page", expected="-o FILE, or --serve", found="both" if serves else "neither",
                         fix="name the file, as in -o run.html; or follow the run with --serve, which writes no file")  # fmt: skip
    if output is not None:
        return write_page(run, output)
    from trainfold.adapters.cli.page.serve import serve_page  # late: it imports a server

    return serve_page(run, port)


def write_page(run: Path, target: Path) -> Answer:
    """Write the page.

    Args:
        run: the run.
        target: the file. One that is there is replaced, if it is a page of a run.

    Returns:
        What was written.

    Raises:
        InvalidArgument: for a target in a checkpoint, or one that is something else than a page.
        CheckpointError: the matching subclass, if it is not a run.
        NotWritable: if it cannot be written there.
    """
    place = Path(free_path(str(target), argument="trainfold page -o"))
    check_replaceable(place)
    page = PageReader(run).read()
    data = page_html(page).encode("utf-8", "backslashreplace")
    write_whole(place, data)
    facts = {
        "run": page.inventory.run,
        "run_id": page.inventory.run_id,
        "page": str(place),
        "size_bytes": len(data),
        "checkpoints": sum(entry.is_candidate for entry in page.inventory.entries),
        "processes": len(sessions_of(page.journal, page.flight)),
        "losses": 0 if page.flight is None else page.flight.loss.count,
        "unread": list(page.unread),
        "journal_lines_left_out": page.left_out,
    }
    rows = (("written", f"{place}, {bytes_text(len(data))}"), ("checkpoints", str(facts["checkpoints"])),
            ("processes", str(facts["processes"]) if page.journal else "not recorded"), ("losses", str(facts["losses"])),
            *(("not read", text) for text in page.unread))  # fmt: skip
    return Answer(facts, (Table(f"The page of {page.inventory.run}", ("", ""), rows),))


def check_replaceable(place: Path) -> None:
    """Check that the target is free, or a page that was written before: a run has other files, and so have people.

    Raises:
        InvalidArgument: if it is something else.
    """
    found = None
    if place.is_dir():
        found = "a directory"
    elif place.exists() and not place.is_file():
        found = "no regular file"  # it may never end, and may not be replaced
    elif place.exists():
        with place.open("rb") as file:
            begin = BEGIN.encode()
            found = None if file.read(len(begin)) == begin else "another file"
    if found is not None:
        raise InvalidArgument("trainfold page -o", expected="a free name, or a page that trainfold has written", found=f"{place}, {found}",
                              fix="name another file, such as run.html")  # fmt: skip


def write_whole(place: Path, data: bytes) -> None:
    """Write a file so that at each moment the old one is there, or the new one, whole.

    Raises:
        NotWritable: if that fails; the old one stays.
    """
    written = None
    try:
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}.", delete=False) as file:
            written = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        written.chmod(0o666 & ~umask)
        written.replace(place)
    except OSError as error:
        if written is not None:
            with suppress(OSError):
                written.unlink()
        raise NotWritable(str(place), expected="a place where a file can be written", found=error,
                          fix="name a file in a directory that is there and may be written") from error  # fmt: skip
