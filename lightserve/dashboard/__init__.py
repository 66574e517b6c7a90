"""The dashboard: one page for browsers, and the events that it is drawn from.

The page holds no data and opens for all. It asks for `EVENTS_PATH` by itself, with an operator's
key where there are keys. Frontends serve both on the HTTP port, the supervisor on the metrics port;
either makes one event a second for all that look at it, and none while there are none.
"""

PAGE_PATH = "/dashboard"
EVENTS_PATH = "/dashboard/events"
