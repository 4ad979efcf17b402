"""Structured output: what may be asked for, the grammars it becomes, and the masks that they put on the vocabulary.

params      the types with which a request asks
spec        one checked, canonical constraint; everything that can be refused without work is refused there
schema      reads JSON schemas: which features they use, and objects that are closed to further properties
support     which back end has which feature
vocabulary  what each token adds to a text, in bytes
grammar     the interface of a compiled grammar
backends/   one library each
compiler    compiles in the background, with a deadline, and keeps what was compiled
requests    the grammars of the core's requests, and their masks
"""
