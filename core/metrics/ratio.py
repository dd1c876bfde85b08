"""`Ratio` and `Perplexity`: the quotient of two sums, such as a loss per token, and its exponential, each rounded once."""

import math
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from typing import Any, ClassVar, final

import attrs

from trainfold.core import tree
from trainfold.core.exact.sum import Exact, ExactSum, exact_add, exact_merge, exact_value, exact_zero, ratio_of, rounded
from trainfold.core.metrics.arguments import real

__all__ = ["Perplexity", "Quotient", "Ratio", "rounded_exp"]

_DIGITS = 40  # to begin with: a float64 has 17, and 20 more decide all but one case in 10**20
_BEYOND = 750  # exp(709.79) is the largest float64, exp(-745.14) rounds to 0


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Quotient:
    """The accumulator of `Ratio` and `Perplexity`.

    Attributes:
        num: the sum of the numerators.
        den: the sum of the denominators.
    """

    num: ExactSum
    den: ExactSum


@attrs.frozen
class _OfQuotient:
    additive: ClassVar[bool] = True

    def zero(self) -> Quotient:
        """The empty accumulator."""
        return Quotient(exact_zero(), exact_zero())

    def merge(self, one: Quotient, other: Quotient) -> Quotient:
        """The accumulator of both."""
        return Quotient(exact_merge(one.num, other.num), exact_merge(one.den, other.den))


@final
@attrs.frozen
class Ratio(_OfQuotient):
    """The sum of numerators over the sum of denominators, an exact fraction, rounded once; None if the denominator is 0.

    A loss per token is the sum of the token losses over the number of tokens; an accuracy is the number of correct items over
    the number that count. Denominators may be fractions (weights). NaN if a numerator was NaN or a denominator was not finite;
    an infinity if a numerator was infinite. Neither is ever lost: they are the result where the denominator is 0, too.

    Examples:
        >>> import torch
        >>> metric = Ratio()
        >>> nll, mask = torch.tensor([[0.5, 1.5], [1.0, 0.0]]), torch.tensor([[True, True], [True, False]])
        >>> metric.result(metric.observe(metric.zero(), nll * mask, mask))
        1.0
        >>> print(metric.result(metric.observe(metric.zero(), 0.0, 0)))
        None
    """

    def observe(self, acc: Quotient, num: Any, den: Any) -> Quotient:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            num: real tensor of any shape, or a number; all elements are added up.
            den: the same; the two shapes may differ. A boolean mask counts its true elements.

        Raises:
            InvalidArgument: for values that are not real numbers.
        """
        return Quotient(exact_add(acc.num, real("Ratio.num", num)), exact_add(acc.den, real("Ratio.den", den)))

    def result(self, acc: Quotient) -> float | None:
        """The ratio."""
        found = ratio_of(exact_value(acc.num), exact_value(acc.den))
        return None if found is None else rounded(found)


@final
@attrs.frozen
class Perplexity(_OfQuotient):
    """``exp(sum of nll / number of tokens)``: one exponential of the exact quotient, rounded once; None without tokens.

    The bits are the same on every machine. An ``nll`` that was NaN or infinite is never lost: it makes the result NaN, infinity
    or 0.0, without tokens too. The mean of the perplexities of batches is a different, larger number (Jensen's inequality), and
    depends on the batch size.

    Examples:
        >>> import torch
        >>> metric = Perplexity()
        >>> acc = metric.observe(metric.zero(), torch.tensor([0.0, 4.0]), torch.tensor([1, 1]))
        >>> metric.result(acc)
        7.38905609893065

    Source: F. Jelinek et al., "Perplexity, a measure of the difficulty of speech recognition tasks", JASA 62 (1977).
    """

    def observe(self, acc: Quotient, nll: Any, tokens: Any) -> Quotient:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            nll: real tensor of any shape, or a number: negative log-likelihoods in nats, for each token or already added up.
            tokens: the same: how many tokens, or their mask.

        Raises:
            InvalidArgument: for values that are not real numbers.
        """
        terms, counted = real("Perplexity.nll", nll), real("Perplexity.tokens", tokens)
        return Quotient(exact_add(acc.num, terms), exact_add(acc.den, counted))

    def result(self, acc: Quotient) -> float | None:
        """The perplexity; infinity if it is larger than any float64."""
        found = ratio_of(exact_value(acc.num), exact_value(acc.den))
        return None if found is None else rounded_exp(found)


def rounded_exp(exponent: Exact) -> float:
    """The float64 nearest to ``exp(exponent)``, computed from integers, so that it does not depend on a mathematical library.

    Digits are added until both ends of the interval round to the same float. They do in the end: the exponential of a fraction
    other than 0 is transcendental, so it never lies in the middle between two floats.

    Args:
        exponent: an exact fraction; or NaN or an infinity, for which the result is that of IEEE 754.

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
        error = context.scaleb(found, 5 - digits)  # of the quotient, at most 750 units in its last digit, and of exp
        low, high = float(context.subtract(found, error)), float(context.add(found, error))
        if low == high:
            return low
        digits *= 2
