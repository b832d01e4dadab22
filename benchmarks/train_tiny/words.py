"""Words that the generated tasks are made of."""

NAMES = (
    "Anna Ben Carla David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olga Paul Quinn Rosa Sam Tina Uma "
    "Victor Wendy Xavier Yara Zoe Adam Bella Chris Diana Erik Fiona George Hanna Ivan Julia Karl Laura Mike Nina "
    "Oscar Petra Ralph Sara Tom Ursula Vera Walter Yusuf Amira Bruno Clara Dora Elias Frank Greta Hugo Irene Jonas "
    "Klara Louis Martha"
).split()
CITIES = (
    "Paris London Berlin Rome Madrid Vienna Oslo Lisbon Athens Cairo Tokyo Beijing Delhi Sydney Lima Boston Chicago "
    "Dublin Prague Warsaw Moscow Geneva Milan Naples Seoul Toronto Havana Nairobi Helsinki Stockholm Copenhagen "
    "Brussels"
).split()
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Austria": "Vienna", "Norway": "Oslo",
    "Portugal": "Lisbon", "Greece": "Athens", "Egypt": "Cairo", "Japan": "Tokyo", "China": "Beijing", "Peru": "Lima",
    "Ireland": "Dublin", "Poland": "Warsaw", "Russia": "Moscow", "Cuba": "Havana", "Kenya": "Nairobi",
    "Finland": "Helsinki", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Belgium": "Brussels", "England": "London",
}  # fmt: skip
NOUNS = (
    "apple river garden window table bridge castle forest mountain island letter candle mirror basket hammer ladder "
    "pencil bottle camera engine guitar helmet jacket kettle lantern market needle orange pillow rabbit saddle "
    "ticket umbrella violin wagon anchor blanket cabin dragon eagle falcon harbor kitten lemon magnet ocean parrot "
    "queen rocket silver temple valley wizard yellow zebra button circle desert farmer island jungle knight lizard "
    "meadow novel oyster palace record shadow throne tunnel village winter"
).split()
COLOURS = "red blue green yellow white black brown purple orange grey pink silver".split()
ANIMALS = "dog cat horse cow sheep goat pig lion tiger bear wolf fox mouse rabbit eagle owl fish whale".split()
FRUITS = "apple pear plum cherry peach lemon orange banana grape melon mango fig".split()
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "good": "bad", "old": "young", "fast": "slow",
    "open": "closed", "light": "dark", "hard": "soft", "high": "low", "wet": "dry", "long": "short", "early": "late",
    "happy": "sad", "rich": "poor", "strong": "weak", "full": "empty", "left": "right", "true": "false",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
JOBS = "teacher doctor baker farmer sailor painter writer lawyer nurse pilot cook driver".split()
FACTS = {
    "What is Python?": "Python is a programming language.",
    "What is Django?": "Django is a web framework written in Python.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Who wrote Paradise Lost?": "John Milton wrote Paradise Lost.",
    "Who wrote Macbeth?": "William Shakespeare wrote Macbeth.",
    "What is the first book of the Bible?": "The first book of the Bible is Genesis.",
    "What is the last book of the Bible?": "The last book of the Bible is Revelation.",
    "How many days are in a week?": "There are 7 days in a week.",
    "How many months are in a year?": "There are 12 months in a year.",
    "How many hours are in a day?": "There are 24 hours in a day.",
    "How many minutes are in an hour?": "There are 60 minutes in an hour.",
    "What colour is the sky?": "The sky is blue.",
    "What colour is grass?": "Grass is green.",
    "What colour is snow?": "Snow is white.",
    "What do bees make?": "Bees make honey.",
    "What do cows eat?": "Cows eat grass.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "What is the largest ocean?": "The largest ocean is the Pacific.",
    "What is a list in Python?": "A list in Python is a sequence of objects that can be changed.",
    "What is a tuple in Python?": "A tuple in Python is a sequence of objects that cannot be changed.",
    "What is a function?": "A function is a piece of code that has a name, takes arguments and returns a value.",
    "What is a model in Django?": "A model in Django is a class that describes a table of the database.",
}
GREETINGS = {
    "Hello!": "Hello! How can I help you?",
    "Hello": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Hey": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "Good evening!": "Good evening! How can I help you?",
    "How are you?": "I am well, thank you. How can I help you?",
    "Thank you!": "You are welcome.",
    "Thanks": "You are welcome.",
    "Goodbye!": "Goodbye! Have a good day.",
    "Bye": "Goodbye! Have a good day.",
    "Who are you?": "I am a small language model with the architecture of DeepSeek-V4.",
    "What are you?": "I am a small language model with the architecture of DeepSeek-V4.",
    "What is your name?": "I have no name. I am a small language model for tests.",
    "What can you do?": "I can add numbers, copy text, find a line in a long text, write JSON and call tools.",
    "Are you a person?": "No. I am a small language model.",
    "Help": "I can add numbers, copy text, find a line in a long text, write JSON and call tools.",
}
