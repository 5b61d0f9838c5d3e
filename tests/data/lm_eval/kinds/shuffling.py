"""Choices in an order that is drawn when the benchmark is loaded."""

import random


def shuffled(docs):
    def shuffle(doc):
        right = doc["choices"][doc["answer"]]
        choices = random.sample(doc["choices"], len(doc["choices"]))
        return {"choices": choices, "answer": choices.index(right)}

    return docs.map(shuffle)
