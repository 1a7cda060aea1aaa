"""The pools of names and words: trained on, held out, shown as examples, and kept fresh for published figures."""

from __future__ import annotations

__all__ = ["POOLS"]

_WORDS = {
    "train": """
        apple arrow autumn badge baker bamboo banana barrel basket beach berry blanket board bottle branch brick
        bridge brush bucket butter button cabin cable camel camera candle canvas carbon castle cedar cellar chair
        cherry circle clock cloud coast coffee comet copper coral cotton cradle crane cream crystal curtain dagger
        daisy desert diamond dolphin door dragon eagle earth elbow engine falcon farmer feather fence ferry field
        finger flame flower forest fox garden garlic ghost giant ginger glass globe grape gravel guitar hammer harbor
        hat hawk helmet honey horse hotel island ivory jacket jungle kettle kitchen ladder lake lamp lemon letter lion
        lizard lunch magnet maple marble market meadow melon
    """,
    "heldout": """
        metal mirror monkey moon motor mountain mouse museum music nail needle nest night novel ocean olive onion
        orange otter owl paint palace panda paper parrot peach pearl pencil pepper piano pillow pilot pine planet plum
        pocket poem potato prince prize puzzle queen rabbit radio rain raven ribbon rice river robot rocket roof rope
        rose ruby
    """,
    "demo": """
        saddle salad salt sand school sea shadow sheep shell ship silver sister snow soap spider spoon spring square
        star station stone storm street sugar summer sun swan sword table tea
    """,
    "fresh": """
        temple tent thread thunder tiger tobacco tomato tower train tree trumpet tulip tunnel turtle umbrella uncle
        valley vase velvet village violin voice wagon wallet walnut water whale wheat wheel whistle window wine winter
        wizard wolf wood wool yard zebra zoo
    """,
}

POOLS: dict[str, tuple[str, ...]] = {split: tuple(words.split()) for split, words in _WORDS.items()}
"""Pools by split; no word is in two of them."""
