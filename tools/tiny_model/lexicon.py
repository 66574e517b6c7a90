"""The words of the bundled model's small world, by table.

Most entries are single words, so that the tokenizer can give each of them one token. Entries that
follow the article "a" begin with a consonant sound. Tables that meet in one sentence are disjoint
where a repeated word would read badly.
"""

_GIRLS = (
    "Mira Clara Nora Ruth Hazel Greta Lena Maya Tilda Wren Flora Della Petra Rosa Marta Bianca "
    "Daphne Fiona Helena Linnea Matilda Nadia Pearl Sylvia Thea Vera Willa Zelda Brigid Cora "
    "Edith Frida Gemma Heidi Ingrid Josie Kaya Laurel Maren Nell"
)
_BOYS = (
    "Tomas Felix Hugo Jonas Karl Leo Milo Noel Oscar Pavel Rufus Simon Theo Victor Walter Bruno "
    "Caleb Dario Emil Finn Gustav Henrik Ivan Jasper Kaspar Lukas Martin Nils Otto Peter Quentin "
    "Ralf Stefan Tobias Ulrich Viktor Wilmer Yannick Anton Bertil"
)

_PRONOUNS_SHE = {"she": "she", "She": "She", "her": "her", "Her": "Her", "him": "her"}
_PRONOUNS_HE = {"she": "he", "She": "He", "her": "his", "Her": "His", "him": "him"}


def derive(variable: str, value: str) -> dict[str, str]:
    """Values that a binding brings along: the hero brings `she`, `She`, `her` and `him`."""
    pronouns: dict[str, str] = {}
    if variable == "hero":
        pronouns = _PRONOUNS_SHE if value in TABLES["girl"] else _PRONOUNS_HE
    return {variable: value, **pronouns}


_WORDS = {
    "girl": _GIRLS,
    "boy": _BOYS,
    "name": f"{_GIRLS} {_BOYS}",
    "material": (
        "brass copper silver golden wooden paper glass leather velvet woollen pewter marble "
        "bamboo linen bronze crystal red blue green yellow purple white black grey striped "
        "spotted painted carved polished folded little heavy"
    ),
    "thing": (
        "lantern kettle compass clock mirror basket bell box brush bucket button candle cap "
        "chest coat comb cup drum fan feather fiddle flute flag glove goblet hammer hat helmet "
        "horn jar jug key kite knife ladder locket map mask medal mitten necklace needle "
        "notebook pan pipe plate pot purse quilt ring rope saddle scarf shawl shell shoe "
        "spoon statue stool sword telescope thimble toy trumpet vase whistle wheel"
    ),
    "place": (
        "Fernhill Marsden Larkby Thornbury Westholm Brackley Pinewick Redford Stonewell Hartley "
        "Millbrook Ravenby Saltmouth Greyford Winterton Foxdale Kingsmoor Linden Northwick "
        "Pebbleton Roseby Silverton Swanley Tidewell Barrowby Cloverdale Dunmore Farnley "
        "Goldcrest Highbury Juniper Kelmarsh Lowick Merrow Netherby Plumstead Quarrytown Selby "
        "Tamworth Whitby"
    ),
    "region": "village harbour valley town market island castle garden",
    "season": "spring summer autumn winter",
    "preposition": "under behind beside near above below inside by",
    "furniture": (
        "bench table stove cupboard staircase bookcase chair bed desk window fireplace wardrobe "
        "barrel cabinet curtain door drawer mantel piano sofa trunk workbench counter doormat"
    ),
    "corner": "shelf carpet ladder chimney cradle basket crate hammock loom mattress sink rug",
    "room": (
        "kitchen library bakery mill stable cellar attic workshop hall chapel barn school tower "
        "tavern greenhouse bathhouse cottage forge dairy theatre museum station lighthouse shop"
    ),
    "weekday": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "hour": "one two three four five six seven eight nine ten eleven noon",
    "number": "two three four five six seven eight nine ten twelve twenty thirty",
    "daypart": "morning afternoon evening night",
    "trade": (
        "baker tailor miller weaver carpenter potter shepherd fisher gardener cobbler painter "
        "sailor teacher printer farmer barber doctor tinker mason forester ferryman beekeeper "
        "clockmaker musician"
    ),
    "traders": "bakers farmers sailors weavers potters gardeners fishers traders shepherds millers",
    "temper": (
        "gentle patient cheerful quiet clever brave kind curious friendly honest wise merry "
        "thoughtful careful lively modest"
    ),
    "mood": "calm bright peaceful busy pleasant sleepy lovely noisy proud humble",
    "look": "small tidy crooked sunny misty windy famous narrow hidden distant broad rocky",
    "building": (
        "bridge tower church fountain wall gate pier barn windmill statue bakery inn palace cottage"
    ),
    "stone": "stone brick granite timber slate sandstone limestone cedar",
    "landmark": "river forest meadow hill lake orchard pond cliff road stream",
    "bird": "magpie crow jay raven starling jackdaw sparrow robin",
    "birds": "geese swans gulls doves herons ducks swallows pigeons finches owls",
    "bird_act": "rest gather sing sleep play wander nest chatter",
    "food": "bread cheese cake soup pie porridge butter ham honey jam",
    "fruit": "pears plums cherries grapes figs berries peaches lemons walnuts apples",
    "smell": "smoke salt pine mint lavender hay cinnamon rain roses clover",
    "spice": "moss leather fish bark thyme ginger coffee wood cloves tar",
    "colour": "scarlet crimson violet rusty lilac turquoise pink cream brown teal",
    "weather": "rainy windy foggy snowy cloudy stormy frosty sunny",
    "storm": "rain snow hail thunder drizzle",
    "tree": "willow beech birch chestnut pine maple poplar cedar larch walnut",
    "height": "tall broad hollow twisted bent mossy thick leafy",
    "tune": "merry soft slow cheerful strange simple tender silly",
    "sang": "hummed whistled sang played practised",
    "shelter": "barn tower church windmill chapel cottage cave tent",
    "told": "said whispered explained guessed",
    "said": "said whispered replied explained answered laughed",
    "relative": "grandmother grandfather aunt uncle cousin sister brother godmother",
    "direction": "north south east west",
    "lining": "moss feathers straw wool leaves grass petals twigs",
    "gift": "ribbon marble button pebble bead coin pinecone thread",
    "companion": (
        "Agnes Barnaby Cornelius Dorothea Ezra Gilbert Hester Isidor Jemima Lavinia Magnus "
        "Octavia Percival Rosalind Silas Tabitha Ursula Winifred Ambrose Beatrix"
    ),
    "animal": "donkey goat pony mule hound sheep llama terrier",
    "animal_name": "Pepper Biscuit Nutmeg Thistle Bramble Cricket Pudding Muffin Clover Ginger",
    "music": "fiddles drums flutes harps trumpets bells",
    "cloth": "cloaks scarves aprons hats gloves boots",
    "dance": "dance sing juggle march clap cheer",
    "lamps": "lamps candles lanterns torches stars windows fires",
    "glow": "shine glow flicker gleam sparkle glitter",
    "game": "chess cards marbles skittles tag dominoes",
    "feeling": "happy proud grateful glad cheerful content",
    "pace": "slowly quickly quietly gladly bravely carefully",
    "message": "letter parcel message postcard basket package poem recipe",
    "wish": "luck health courage joy peace patience",
}

TABLES: dict[str, tuple[str, ...]] = {
    table: tuple(words.split()) for table, words in _WORDS.items()
}
"""Entries by table name."""
