"""What happens to every token of a prompt, decided in one place: the connector, ``kvcomm explain``, the fake engine and
the benchmarks all ask `planner.Planner`.
"""
