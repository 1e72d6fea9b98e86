"""Random numbers that are the same in every process: generators by name, and orders that need no memory."""

from __future__ import annotations

import random
from collections.abc import Iterator

from memagent_evaluation.samples import TaskSettings


def source(settings: TaskSettings, *names: str | int) -> random.Random:
    """Random numbers that depend only on the seed and these names."""
    return random.Random("/".join(str(name) for name in (settings.seed, *names)))


class Order:
    """The numbers below `size` in a random order that is computed, not stored.

    A number goes through a bijection on the next power of two (multiplications by odd numbers, and exclusive ors with
    its own upper half), with constants drawn from `chance`, repeated until the result is below `size`.
    """

    def __init__(self, size: int, chance: random.Random) -> None:
        bits = max(2, (size - 1).bit_length())
        self._size = size
        self._mask = (1 << bits) - 1
        self._shift = (bits + 1) // 2
        self._factors = tuple(chance.getrandbits(bits) | 1 for _ in range(3))
        self._offset = chance.getrandbits(bits)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        """The number at a place; places are 0 to `size` - 1."""
        if not 0 <= place < self._size:
            raise IndexError(place)
        mask, shift, (first, second, third) = self._mask, self._shift, self._factors
        mixed = place
        while True:
            mixed = ((mixed + self._offset) * first) & mask
            mixed ^= mixed >> shift
            mixed = (mixed * second) & mask
            mixed ^= mixed >> shift
            mixed = (mixed * third) & mask
            mixed ^= mixed >> shift
            if mixed < self._size:
                return mixed

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self._size))
