"""A load client for any OpenAI-compatible server; `bench/load_test.py` is its command line.

It imports nothing of lightserve. Modules, in the order in which a run uses them:

    cli, options      the command line; `Traffic` and `ServerOptions` are what it is parsed into
    traces, lengths, arrivals, workload
                      which requests are sent and when: `Plan`s, before anything is sent
    calibration, prompts
                      texts of a wanted number of tokens without knowing the tokenizer
    sse, client, runner
                      sends a plan and writes down when every event arrived: `Record`s
    statistics        what the definitions in there make of records; pure
    result, tables, plots, compare
                      one result format (JSON), tables and pictures made from it
"""
