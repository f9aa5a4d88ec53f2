"""Names for the marks of a chart: common words, row labels of tables, pronounceable inventions."""

import random
from collections.abc import Sequence

from dreams_nas.targets.embedded.tables import label_pool

_WORD_LIST = """
Amber Anchor Apple Arrow Aspen Autumn Badger Bamboo Barley Basil Beacon Berry Birch Bishop
Bottle Bridge Bronze Brook Butter Cabin Cactus Candle Canyon Carbon Castle Cedar Cherry Cider
Cinder Circus Citrus Clover Coast Cobalt Comet Copper Coral Cotton Crater Cricket Crystal
Dahlia Daisy Delta Desert Dragon Eagle Echo Ember Falcon Feather Fennel Fern Field Finch
Flint Forest Fossil Fountain Galaxy Garden Garlic Garnet Ginger Glacier Granite Grove Hammer
Harbor Harvest Hazel Heron Hollow Honey Island Ivory Ivy Jasmine Juniper Kettle Lagoon
Lantern Laurel Lemon Lily Linen Lion Lotus Magnet Maple Marble Meadow Melon Mercury Meteor
Mint Mirror Morning Moss Mountain Mustard Nectar Nettle Nickel North Nutmeg Oasis Oat Ocean
Olive Onyx Opal Orchard Orchid Otter Oyster Panther Paper Parsley Pearl Pebble Pepper Pine
Planet Plum Pollen Poplar Prairie Quartz Quill Rabbit Radish Raven Reef Ribbon River Robin
Rocket Rose Saffron Sage Salmon Sand Sapphire Satin Saturn Shadow Shell Silk Silver Sparrow
Spice Spruce Star Stone Storm Summer Sunset Swan Thistle Thunder Tiger Timber Topaz Tulip
Tundra Turtle Valley Vanilla Velvet Violet Walnut Water Willow Winter Wolf Zebra Zinc
"""
_ONSET_LIST = "b br c ch d dr f fl g gr h j k kl l m n p pl qu r s sh sk st t th tr v w z"
_VOWEL_LIST = "a e i o u ai ea ee ia o a e"

WORDS = tuple(_WORD_LIST.split())
_ONSETS = tuple(_ONSET_LIST.split())
_VOWELS = tuple(_VOWEL_LIST.split())
_CODAS = ("", "", "l", "n", "r", "s", "m", "nd", "rt", "x", "th", "ck", "v")


def invent_name(rng: random.Random) -> str:
    """Make up a pronounceable name of two or three syllables."""
    num_syllables = rng.choice((2, 2, 2, 3))
    syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(num_syllables)]
    return ("".join(syllables) + rng.choice(_CODAS)).capitalize()


def sample_names(
    split: str, num_marks: int, rng: random.Random, with_inventions: bool = False
) -> tuple[str, ...]:
    """Draw distinct names for the marks of one chart, none contained in another.

    Nine in ten are common words, the others row labels of the split's tables. The model has to
    copy a name from the prompt. With mostly inventions, which are all new, none was right after an
    hour; what names of this pool reach is in the card of the weights.

    Args:
        split: decides the tables.
        num_marks: names to draw.
        rng: draws them.
        with_inventions: two in three are inventions instead; for the text that the vocabulary is
            learned from, so that unknown names split into few pieces.
    """
    labels = label_pool(split)
    inventions_only = with_inventions and rng.random() < 0.5
    names: list[str] = []
    while len(names) < num_marks:
        if with_inventions:
            name = _draw_any(labels, 0.0 if inventions_only else rng.random(), rng)
        else:
            name = rng.choice(WORDS if rng.random() < 0.9 or not labels else labels)
        if not any(name in other or other in name for other in names):
            names.append(name)
    return tuple(names)


def _draw_any(labels: Sequence[str], kind: float, rng: random.Random) -> str:
    if kind < 0.3:
        return invent_name(rng)
    return rng.choice(WORDS) if kind < 0.7 or not labels else rng.choice(labels)
