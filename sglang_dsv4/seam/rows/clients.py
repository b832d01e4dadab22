"""Rows of the table of hooks, `hooks.HOOKS`, for the process that answers clients."""

from __future__ import annotations

from sglang_dsv4.seam.hook_kinds import (
    REFUSED,
    REQUESTS,
    SURVIVES,
    UPDATES,
    VALIDATES,
    Hook,
    Kind,
    Process,
)

PROCESSOR = "_processor"
GENERATE_ROUTE = "serve_generate_request"
MESSAGE, MESSAGE_DELTA = "AnthropicMessagesResponse", "MessageDeltaEvent"

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_PARSER = f"{REQUESTS}.tool_calls.output_parser"
_OPENAI = "sglang.srt.entrypoints.openai"
_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving"
_RECIPE = f"{_OPENAI}.serving_deepseek_recipe.DeepSeekRecipeChatEncodingAdapter"
_RECIPE_OUTPUT = "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser"
_UPDATE = "sglang_dsv4.weights.updates"
_ROUTES = f"{_UPDATE}.routes"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"

_CALLS = "SGLang gives a tool call to the client only if it is complete and its arguments are a JSON object"
_SWITCHES = "SGLang honours the switch for this model's chat encoding, or answers 400"
_USAGE = "SGLang reports them on Anthropic's route"
_INLINE = "SGLang renders a late system message of this encoding where it was sent"

CLIENTS = (
    Hook(f"{_TOKENIZER}.__init__", Kind.AFTER, Process.LAUNCHER, f"{REQUESTS}.failures:note_model_and_answer_errors",
         "a ValueError that no route catches, and a body that SGLang's validators can't read, are a 400, not a 500",
         "SGLang's HTTP server answers 400"),
    Hook(f"{_TOKENIZER}._handle_abort_req", Kind.AROUND, Process.LAUNCHER, f"{REQUESTS}.failures:finish_aborted",
         "an abort by our guard is answered with the reason alone; SGLang reads fields of the request",
         SURVIVES),
    Hook(f"{_TOKENIZER}._handle_batch_output", Kind.AROUND, Process.LAUNCHER, f"{REQUESTS}.failures:finish_outputs",
         "an output that can't be handled ends its requests, not the server", "SGLang's output loop survives an error"),
    Hook(f"{_TOKENIZER}._handle_abort_finish_reason", Kind.AROUND, Process.LAUNCHER,
         f"{REQUESTS}.failures:raise_in_streams",
         "a refused request in a stream is an error without the token that SGLang computes for it",
         "SGLang's scheduler refuses a request without a forward"),
    Hook(f"{_TOKENIZER}.configure_logging", Kind.BEFORE, Process.LAUNCHER, f"{REFUSED}.administration:check_logging",
         "levels, formats and folders that do not exist get a 400 before the first is set", VALIDATES),
    Hook(f"{_TOKENIZER}.pause_generation", Kind.BEFORE, Process.LAUNCHER, f"{REFUSED}.administration:check_pause",
         "a pause that stages of a pipeline would not make gets a 400", "SGLang's loop for stages pauses"),
    Hook("sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._validate_request", Kind.AFTER,
         Process.LAUNCHER, f"{REFUSED}.guards:check_completion",
         "fields of `/v1/completions` that SGLang ignores, `best_of` and `suffix`, get a 400",
         "SGLang implements or refuses them"),
    Hook(f"{_TOKENIZER}.__init__", Kind.AFTER, Process.LAUNCHER,
         f"{_ROUTES}:add_route", "a weight update that its trainer will not end can be dropped", UPDATES),
    *(
        Hook(f"{_CONTROL}.{part}", Kind.BEFORE, Process.LAUNCHER, f"{_ROUTES}:refuse_parts",
             "replicas, which would not exchange their weights together, take them from files only", UPDATES)
        for part in ("begin_weight_update", "init_weights_update_group", "update_weights_from_tensor",
                     "update_weights_from_distributed")
    ),
    *(
        Hook(f"{_CONTROL}.update_weights_from_{source}", Kind.BEFORE, Process.LAUNCHER, f"{_ROUTES}:hold_version",
             "a weight version is reported once its weights serve", UPDATES)
        for source in ("tensor", "distributed")
    ),
    Hook(f"{_CONTROL}.end_weight_update", Kind.AROUND, Process.LAUNCHER, f"{_ROUTES}:end",
         "the scheduler is asked again while it finishes its last step; the weight version is set", UPDATES),
    Hook(f"{_TOKENIZER}.update_weights_from_disk", Kind.AROUND,
         Process.LAUNCHER, f"{_ROUTES}:from_files",
         "the scheduler is asked again while it finishes its last step; no replica exchanges its weights alone",
         UPDATES),
    Hook(f"{_CONTROL}.flush_cache", Kind.AROUND, Process.LAUNCHER, "sglang_dsv4.seam.all_replicas:flush",
         "a flush that a replica refuses gets a 400", "SGLang merges the replicas' answers"),
    Hook("sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request",
         Kind.AROUND, Process.LAUNCHER, f"{REFUSED}.guards:check_tokens_to_decode",
         "invalid token ids for `/detokenize` get a 400", VALIDATES),
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__", Kind.AFTER, Process.LAUNCHER,
         f"{_PARSER}:start", "declares the metrics of tool calls", _CALLS),
    Hook(f"{_RECIPE}._new_output_parser", Kind.AROUND, Process.LAUNCHER,
         f"{_PARSER}:in_chat", "tells the tools' schemas to the parser of a chat answer", _CALLS),
    Hook(f"{_RECIPE}._new_responses_parser", Kind.AROUND, Process.LAUNCHER,
         f"{_PARSER}:in_responses",
         "tells the tools' schemas to the parser of a response's answer", _CALLS),
    Hook(f"{_RECIPE}.parse_function_call_text", Kind.AROUND, Process.LAUNCHER,
         f"{_PARSER}:in_text", "tells the tools' schemas to the parser of `/parse_function_call`", _CALLS),
    Hook(f"{_RECIPE_OUTPUT}.__init__", Kind.AROUND, Process.LAUNCHER, f"{_PARSER}:make_parser",
         "leaves tool calls to our reader: final, with arguments that are a JSON object, or text", _CALLS),
    Hook(f"{_OPENAI}.serving_responses.OpenAIServingResponses.create_responses", Kind.AROUND, Process.LAUNCHER,
         f"{REQUESTS}.chat.responses:read_switches", "`thinking` and `custom_params` of a Responses request are read",
         "SGLang's `ResponsesRequest` has these fields"),
    Hook(f"{_OPENAI}.protocol.ResponsesRequest.to_sampling_params", Kind.AFTER, Process.LAUNCHER,
         f"{REQUESTS}.chat.responses:complete_sampling",
         "an answer of the Responses API has all `max_output_tokens`, and a thinking budget",
         "SGLang takes no tokens off, and its `ResponsesRequest` has `custom_params`"),
    Hook(f"{_OPENAI}.serving_chat.OpenAIServingChat._process_messages", Kind.BEFORE, Process.LAUNCHER,
         f"{REQUESTS}.chat.switches:settle",
         "`thinking`, `enable_thinking` and a thinking budget of a chat request are honoured, contradictions get a 400",
         _SWITCHES),
    Hook(f"{_ANTHROPIC}.AnthropicServing._convert_to_chat_completion_request", Kind.AROUND,
         Process.LAUNCHER, f"{REQUESTS}.chat.switches:carry_budget",
         "`thinking.budget_tokens` is kept, and not logged as one that nothing enforces", _SWITCHES),
    Hook(f"{_ANTHROPIC}._anthropic_usage_from_openai", Kind.AFTER, Process.LAUNCHER,
         f"{REQUESTS}.chat.usage:add_thinking_tokens", "usage reports reasoning tokens on Anthropic's route", _USAGE),
    Hook(f"{_ANTHROPIC}.AnthropicServing.__init__", Kind.AFTER, Process.LAUNCHER,
         f"{REQUESTS}.chat.usage:start", "sets the two attributes that carry them", _USAGE),
    Hook(f"{_OPENAI}.serving_chat.OpenAIServingChat._resolve_inline_system_support", Kind.AFTER, Process.LAUNCHER,
         f"{REQUESTS}.chat.late_system:keep_inline",
         "the Anthropic and Responses routes leave a system message where it was sent", _INLINE),
    Hook(f"{_OPENAI}.serving_chat.OpenAIServingChat._process_messages", Kind.BEFORE, Process.LAUNCHER,
         f"{REQUESTS}.chat.late_system:gather_tools",
         "the model is told of the tools of a system message", "SGLang renders the tools of messages"),
    Hook(f"{_RECIPE}.encode_messages", Kind.AROUND, Process.LAUNCHER, f"{REQUESTS}.chat.late_system:encode",
         "a late system message stays at its place, and the prefix before it stays stored", _INLINE),
    # ---- attributes of SGLang's objects, set by the function in brackets
    Hook(f"{_RECIPE_OUTPUT}.{PROCESSOR}", Kind.ATTRIBUTE, Process.LAUNCHER, f"{_PARSER}:read_calls",
         "reads the calls, and keeps the text before half a letter (`requests.tool_calls.output_parser.make_parser`)",
         _CALLS),
    *(
        Hook(f"{_ANTHROPIC}.{model}", Kind.ATTRIBUTE, Process.LAUNCHER, f"{REQUESTS}.chat.usage:carrying_details",
             "its JSON has all fields of its usage (`requests.chat.usage.start`)", _USAGE)
        for model in (MESSAGE, MESSAGE_DELTA)
    ),
    Hook(f"sglang.srt.entrypoints.http_server.{GENERATE_ROUTE}", Kind.ATTRIBUTE, Process.LAUNCHER,
         f"{REQUESTS}.failures:refuse_streams", "a stream of `/generate` that begins with an error is a 400 "
         "(`requests.failures.note_model_and_answer_errors`)", "SGLang begins a stream after the request is accepted"),
)  # fmt: skip
