"""A load client for any OpenAI-compatible server; `lightserve bench` is its command line.

In the order in which a run uses them:

    options      what a run is told: `Traffic`, `Targets`, `ServerOptions`
    workload     which requests are sent and when: `Plan`s, before anything is sent
    prompts      texts of a wanted number of tokens without knowing the tokenizer
    session      an invocation: calibration, warm-up, runs
    runner, client, records
                 sends a plan and writes down when every event arrived: `Record`s
    statistics   what the definitions in there make of records; pure
    result, tables, plots
                 one result format (JSON), tables and pictures made from it

aiohttp and rich come with the extra `bench`, matplotlib with `plots`.
"""
