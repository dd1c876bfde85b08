"""The texts of warnings about saves around a ``break`` out of ``live.batches()``; each takes the number of the epoch."""

from typing import Final

TOO_EARLY: Final = (
    "a save in epoch %d of live.epochs() was made before the first batch, and after the body moved random streams, or changed a hyperparameter "
    "or a scheduler. A resume from it runs the body from its beginning, and so does all of this twice. Save at the very start of the "
    "body, inside the loop over batches, or after it"
)
LEFT_AFTER: Final = (
    "the newest save was made inside the loop over live.batches(), which then left epoch %d early. A resume from that save continues "
    "in this epoch, and a plain loop begins the next one. If this loop leaves its epochs on purpose, test for it before the step, or "
    "save after the break as well; if it kept an iterator of live.batches() in a variable, delete that before the save"
)
STOPPED: Final = (
    "the newest save was made after a break out of live.batches(), and counts epoch %d as left: a resume from it begins the next epoch, "
    "as a plain loop would. If the run was stopped there and must continue in this epoch, save before the break, inside the inner loop"
)
KEPT: Final = (
    "the newest save in epoch %d of live.epochs() counts as one inside the loop over batches, because the loop draws ahead and a variable "
    "still holds the iterator of live.batches() that had ended: a resume from it repeats what comes after that loop. If the save was made "
    "after the loop, delete the variable before it, or write the prefetcher into the loop: `for batch in prefetch(live.batches()):`"
)
AGAIN: Final = (
    "the body of live.epochs() iterates over live.batches() again in epoch %d, which it had left early: this continues the epoch, and a "
    "plain loop over the loader would restart it. A resume from a save between the two begins the next epoch. To read an epoch in "
    "parts, keep one iterator, `batches = iter(live.batches())`, and read from that"
)
NEXT_LOADER: Final = (
    "a save in epoch %d of live.epochs() was made after the loop over the batches of one loader, and before the loop over those of "
    "another one. A resume from it begins the next epoch, without the rest of this body. Save inside a loop over batches, or "
    "at the end of the body"
)
