"""How is a call of a model made smaller, and into calls with other numbers of tokens?

Nothing tells which dims of a model's arguments belong together: frames, height and width of latents, the length of a
prompt and of its mask, a table of rotary embeddings with a row per token, ints that say a shape once more. So it is
tried out. A guess changes one size, or all equal ones, and if need be the numbers of tokens with them; it is right if
the model takes it and its blocks then see other sizes. Attention is left out of these calls, so they cost little.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from ringspan.adapters.diffusers.leaves import SizePlace, flatten, numbers_of, resize
from ringspan.adapters.diffusers.trace import Trace

_SMALL = 16  # sizes up to here stay
_TARGETS = (12, 16, 8, 24, 20, 28)
_PATCHES = (4, 1, 8, 16)  # latents in one token
_MOST_SINGLE = 8  # places of one size that are tried one by one

Dry = Callable[[dict[str, Any]], Trace | None]  # None if the model fails
Sizes = dict[SizePlace, int]


class Variant(NamedTuple):
    """A dry call, with the sizes that were changed to make it."""

    arguments: dict[str, Any]
    trace: Trace
    places: frozenset[SizePlace]
    is_video: bool  # did the output change its shape?


class CallFamily(NamedTuple):
    """A small call, and others that differ from it in one size each."""

    base: Variant
    variants: tuple[Variant, ...]

    @property
    def places(self) -> frozenset[SizePlace]:
        """All places whose sizes may change."""
        return frozenset().union(*(variant.places for variant in self.variants))


def make_family(arguments: dict[str, Any], dry: Dry) -> CallFamily | None:
    """Smaller copies of a call; None if it does not work even without attention."""
    family = None
    for takes_features, shrinks in ((False, True), (True, True), (True, False)):
        family = _Search(dry, takes_features=takes_features, shrinks=shrinks).family(arguments)
        if family is None or any(variant.is_video for variant in family.variants):
            break
    return family


def combine(family: CallFamily, dry: Dry) -> dict[str, Any]:
    """A call that differs from the base in as many sizes as possible."""
    base = family.base.arguments
    own = numbers_of(base)
    changed: Sizes = {}
    for variant in family.variants:
        sizes = numbers_of(variant.arguments)
        if variant.places & changed.keys():
            continue
        more = changed | {place: sizes[place] for place in variant.places if sizes[place] != own[place]}
        if dry(resize(base, more)) is not None:
            changed = more
    return resize(base, changed)


class _Search:
    """Tries sizes out. Last dims of three are taken for features, and the call is made smaller first, if that works."""

    def __init__(self, dry: Dry, *, takes_features: bool, shrinks: bool) -> None:
        self.dry = dry
        self.shrinks = shrinks
        self.takes_features = takes_features

    def family(self, arguments: dict[str, Any]) -> CallFamily | None:
        """A small call and its variants."""
        arguments = self._shrink(arguments) if self.shrinks else arguments
        trace = self.dry(arguments)
        if trace is None:
            return None
        variants: list[Variant] = []
        for size in self._sizes(arguments):
            targets = (size - 1, size + 1, size - 2, size + 2, size + 4, size // 2, 2 * size)
            variants += self._variants(arguments, size, targets, trace)
        return CallFamily(Variant(arguments, trace, frozenset(), False), tuple(variants))

    def _shrink(self, arguments: dict[str, Any]) -> dict[str, Any]:
        trace = self.dry(arguments) if max(self._sizes(arguments), default=0) <= _SMALL else None
        for size in self._sizes(arguments):
            while size > _SMALL:
                taken = self._sizes(arguments)  # equal sizes could be told apart less easily
                targets = sorted((x for x in _TARGETS if x < size), key=lambda x: x in taken)
                found = next(self._variants(arguments, size, targets, trace), None)
                if found is None:
                    break
                arguments, trace = found.arguments, found.trace
        return arguments

    def _variants(
        self, arguments: dict[str, Any], size: int, targets: Sequence[int], before: Trace | None
    ) -> Iterator[Variant]:
        """Variants of a size that the model accepts; each place of this size is changed once."""
        places = self._places(arguments)
        done: set[SizePlace] = set()
        for guess in _guesses(places, size, before):
            for target in targets:
                sizes = guess(target)
                if (
                    target < 2
                    or sizes is None
                    or min(sizes.values(), default=1) < 1
                    or any(place in done for place in sizes if places[place] == size)
                ):
                    continue
                changed = resize(arguments, sizes)
                trace = self.dry(changed)
                if trace is None or (before is not None and trace.form != before.form):
                    continue
                if before is None or trace.sizes != before.sizes:
                    done |= {place for place in sizes if places[place] == size}
                    is_video = before is not None and trace.output_sizes != before.output_sizes
                    yield Variant(changed, trace, frozenset(sizes), is_video)
                    break

    def _sizes(self, arguments: dict[str, Any]) -> list[int]:
        return sorted(set(self._places(arguments).values()), reverse=True)

    def _places(self, arguments: dict[str, Any]) -> Sizes:
        """Numbers that could be sizes of a sequence."""
        ndims = {path: x.ndim for path, x in flatten(arguments) if isinstance(x, torch.Tensor)}
        tokens = [x for _, x in flatten(arguments) if isinstance(x, torch.Tensor) and x.ndim >= 3]
        batch = tokens[0].shape[0] if tokens else 0

        def is_fixed(place: SizePlace, size: int) -> bool:
            is_batch = place.dim == 0 and size == batch
            is_feature = ndims.get(place.path) == 3 and place.dim == 2 and not self.takes_features
            return size < 2 or is_batch or is_feature

        return {place: size for place, size in numbers_of(arguments).items() if not is_fixed(place, size)}


def _guesses(places: Sizes, size: int, before: Trace | None) -> Iterator[Callable[[int], Sizes | None]]:
    """Ways to change every place of this size: first these places alone, then with the numbers of tokens."""
    alike = [place for place, value in places.items() if value == size]
    groups = [[place] for place in alike[:_MOST_SINGLE]] if len(alike) > 1 else []
    groups += [alike]
    for group in groups:
        yield partial(_all_of, group)
    lengths = None if before is None else before.lengths
    larger = {place: x for place, x in places.items() if x > size and (lengths is None or x in lengths)}
    apart = [{place: x for place, x in larger.items() if x == value} for value in sorted(set(larger.values()))[::-1]]
    for following in apart:
        for group in groups:
            yield partial(_shifted, group, following, size)
    for power in (1, 2):
        for following in [*apart, larger] if len(apart) > 1 else apart:
            for group in groups:
                yield partial(_scaled, group, following, size, power)
    for path, num_dims, patch in product({place.path for place in alike}, (2, 3), _PATCHES):
        area = dict([(place, x) for place, x in places.items() if place.path == path][-num_dims:])
        for following in apart if len(area) == num_dims else ():
            for group in groups:
                yield partial(_moved, group, following, area, patch)


def _all_of(group: list[SizePlace], target: int) -> Sizes:
    return dict.fromkeys(group, target)


def _scaled(group: list[SizePlace], following: Sizes, size: int, power: int, target: int) -> Sizes | None:
    """Also the numbers that are multiples of the size; None if one of them is not."""
    new = {place: divmod(value * target**power, size**power) for place, value in following.items()}
    if any(rest for _, rest in new.values()):
        return None
    return dict.fromkeys(group, target) | {place: value for place, (value, _) in new.items()}


def _moved(group: list[SizePlace], following: Sizes, area: Sizes, patch: int, target: int) -> Sizes | None:
    """Also the numbers that count the patches of latents, beside others."""
    before, after = prod(area.values()), prod(target if place in group else x for place, x in area.items())
    if before == after or before % patch or after % patch:
        return None
    return dict.fromkeys(group, target) | {x: value + (after - before) // patch for x, value in following.items()}


def _shifted(group: list[SizePlace], following: Sizes, size: int, target: int) -> Sizes:
    """Also the numbers that are larger by as many others, such as the tokens of a prompt."""
    return dict.fromkeys(group, target) | {place: value + target - size for place, value in following.items()}
