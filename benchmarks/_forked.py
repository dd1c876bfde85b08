"""`forked`: a measurement in a process of its own, which has imported everything."""

import json
import os
import traceback
import warnings


def forked(action, *arguments):
    """Return what a function returns in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            warnings.simplefilter("ignore")
            os.write(write, json.dumps(action(*arguments)).encode())
            code = 0
        except BaseException:  # noqa: BLE001 - the child ends here
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit("a measurement failed")
    return json.loads(text)
