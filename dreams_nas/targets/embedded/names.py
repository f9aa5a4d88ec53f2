"""Names for the marks of a chart: common words, row labels of tables, pronounceable inventions."""

import random

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


def sample_names(split: str, num_marks: int, rng: random.Random) -> tuple[str, ...]:
    """Draw distinct names for the marks of one chart, none contained in another.

    Half the charts use invented names only, the others mix common words and row labels of the
    split's tables in.
    """
    labels = label_pool(split)
    plain = rng.random() < 0.5
    names: list[str] = []
    while len(names) < num_marks:
        kind = 0.0 if plain else rng.random()
        if kind < 0.3:
            name = invent_name(rng)
        elif kind < 0.7 or not labels:
            name = rng.choice(WORDS)
        else:
            name = rng.choice(labels)
        if not any(name in other or other in name for other in names):
            names.append(name)
    return tuple(names)
