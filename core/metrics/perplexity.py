"""`Perplexity`: the exponential of a loss per token, the same bits on every machine."""

import math
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from typing import Any, ClassVar, final

import attrs

from trainfold.core.exact.sum import Exact
from trainfold.core.metrics.arguments import real
from trainfold.core.metrics.ratio import Quotient, add_terms, merge_quotients, no_terms, quotient_of

__all__ = ["Perplexity", "rounded_exp"]

_DIGITS = 40  # to begin with: a float64 has 17, and 20 more decide all but one case in 10**20
_BEYOND = 750  # exp(709.79) is the largest float64, exp(-745.14) rounds to 0


@final
@attrs.frozen
class Perplexity:
    """``exp(sum of nll / number of tokens)``: one exponential of the exact quotient, rounded once; None without tokens.

    A ``nll`` that was NaN or infinite is never lost: it makes NaN, infinity or 0.0, without tokens too. The mean of the perplexities of batches is another, larger number (Jensen), and depends on the batch size.

    Examples:
        >>> import torch
        >>> metric = Perplexity()
        >>> acc = metric.observe(metric.zero(), torch.tensor([0.0, 4.0]), torch.tensor([1, 1]))
        >>> metric.result(acc)
        7.38905609893065

    Source: F. Jelinek et al., "Perplexity, a measure of the difficulty of speech recognition tasks", JASA 62 (1977).
    """

    additive: ClassVar[bool] = True

    def zero(self) -> Quotient:
        """Nothing seen."""
        return no_terms()

    def observe(self, acc: Quotient, nll: Any, tokens: Any) -> Quotient:
        """Add a batch.

        Args:
            acc: what was seen before.
            nll: real tensor of any shape, or a number: negative log-likelihoods in nats, of tokens or already added up.
            tokens: the same: how many tokens, or their mask.

        Raises:
            InvalidArgument: for what is not real.
        """
        return add_terms(acc, real("Perplexity.nll", nll), real("Perplexity.tokens", tokens))

    def merge(self, one: Quotient, other: Quotient) -> Quotient:
        """All that both have seen."""
        return merge_quotients(one, other)

    def result(self, acc: Quotient) -> float | None:
        """The perplexity; infinity where it is larger than any float64."""
        found = quotient_of(acc)
        return None if found is None else rounded_exp(found)


def rounded_exp(exponent: Exact) -> float:
    """The float64 nearest to ``exp(exponent)``; computed from integers, so no mathematical library has a say in it.

    Digits are added until both ends of what is known round to the same float: they do in the end, since the exponential of
    a fraction other than 0 is transcendental and so no middle between two floats.

    Args:
        exponent: an exact fraction; or NaN or an infinity, of which it says what IEEE 754 says.

    Examples:
        >>> rounded_exp(Fraction(1)), rounded_exp(Fraction(-800)), rounded_exp(Fraction(1000))
        (2.718281828459045, 0.0, inf)

    Source: A. Ziv, "Fast evaluation of elementary mathematical functions with correctly rounded last bit" (1991); Lindemann (1882).
    """
    if isinstance(exponent, float) and math.isnan(exponent):
        return math.nan
    if not -_BEYOND <= exponent <= _BEYOND:
        return math.inf if exponent > 0 else 0.0
    exact, digits = Fraction(exponent), _DIGITS
    if exact == 0:
        return 1.0
    while True:
        context = Context(prec=digits, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])
        power = context.divide(Decimal(exact.numerator), Decimal(exact.denominator))
        found = context.exp(power)
        error = context.scaleb(found, 5 - digits)  # of the quotient, at most 750 units of its last digit, and of exp
        low, high = float(context.subtract(found, error)), float(context.add(found, error))
        if low == high:
            return low
        digits *= 2
