//! The formats in which the APIs of models state usage: one row each.

use super::decimal::Decimal;
use super::json_pointer::{JsonPointer, NodeId, PointerTree, SlotId, TextId};
use super::usage::{Kind, Usage};
use super::values::{Value, Values};

/// What a member states. The kinds of [`Usage`] are disjoint; members of the APIs overlap differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Input, with [`Part::CachedOfInput`].
    Input,
    /// Input beside [`Part::Input`].
    MoreInput,
    CachedOfInput,
    Cached,
    CacheWrite,
    /// Output, with [`Part::ReasoningOfOutput`].
    Output,
    ReasoningOfOutput,
    Reasoning,
    /// Everything, for answers that state neither input nor output.
    Total,
}

use Part::{CacheWrite, Cached, CachedOfInput, Input, MoreInput, Output, Reasoning, ReasoningOfOutput, Total};

struct Format {
    /// Where in a document the usage is.
    places: &'static [&'static str],
    /// Members of the usage. With equal parts, the last one that a document states counts.
    members: &'static [(&'static str, Part)],
}

/// An answer has the format of which it states the most members; of several such formats, the first.
const FORMATS: [Format; 6] = [
    // OpenAI chat completions, completions and embeddings, also of vLLM, Ollama, llama.cpp, Mistral and DeepSeek.
    Format {
        places: &["/usage"],
        members: &[
            ("/prompt_tokens", Input),
            ("/prompt_tokens_details/cached_tokens", CachedOfInput),
            ("/prompt_cache_hit_tokens", CachedOfInput),
            ("/completion_tokens", Output),
            ("/completion_tokens_details/reasoning_tokens", ReasoningOfOutput),
            ("/total_tokens", Total),
        ],
    },
    // OpenAI responses; in a stream, the last event has the whole response.
    Format {
        places: &["/usage", "/response/usage"],
        members: &[
            ("/input_tokens", Input),
            ("/input_tokens_details/cached_tokens", CachedOfInput),
            ("/output_tokens", Output),
            ("/output_tokens_details/reasoning_tokens", ReasoningOfOutput),
            ("/total_tokens", Total),
        ],
    },
    // Anthropic messages; in a stream, `message_start` has the message, and `message_delta` the output.
    Format {
        places: &["/usage", "/message/usage"],
        members: &[
            ("/input_tokens", Input),
            ("/cache_read_input_tokens", Cached),
            ("/cache_creation_input_tokens", CacheWrite),
            ("/output_tokens", Output),
        ],
    },
    // Gemini, also of Vertex AI.
    Format {
        places: &["/usageMetadata"],
        members: &[
            ("/promptTokenCount", Input),
            ("/toolUsePromptTokenCount", MoreInput),
            ("/cachedContentTokenCount", CachedOfInput),
            ("/candidatesTokenCount", Output),
            ("/thoughtsTokenCount", Reasoning),
            ("/totalTokenCount", Total),
        ],
    },
    // Amazon Bedrock: Converse and ConverseStream.
    Format {
        places: &["/usage"],
        members: &[
            ("/inputTokens", Input),
            ("/cacheReadInputTokens", Cached),
            ("/cacheWriteInputTokens", CacheWrite),
            ("/outputTokens", Output),
            ("/totalTokens", Total),
        ],
    },
    // Ollama: `/api/chat`, `/api/generate` and `/api/embed`.
    Format { places: &[""], members: &[("/prompt_eval_count", Input), ("/eval_count", Output)] },
];

/// An answer is a document; a stream of Gemini may be an array of them.
const DOCUMENTS: [NodeId; 2] = [PointerTree::ROOT, PointerTree::ELEMENT];

/// Where answers name their model: OpenAI and Anthropic; the events of both; Gemini.
const MODELS: [&str; 4] = ["/model", "/response/model", "/message/model", "/modelVersion"];

/// The slots of one format.
#[derive(Debug)]
struct FormatSlots(Vec<(Part, SlotId)>);

/// The slots of all formats.
#[derive(Debug)]
pub struct KnownFormats(Vec<FormatSlots>);

impl KnownFormats {
    pub fn want(tree: &mut PointerTree) -> KnownFormats {
        KnownFormats(FORMATS.iter().map(|format| FormatSlots::want(format, tree)).collect())
    }

    /// `None` if the answer states no usage, or a value that is no number of tokens.
    pub fn usage(&self, values: &Values) -> Option<Usage> {
        let stated =
            |format: &&FormatSlots| format.0.iter().filter(|(_, slot)| values.get(*slot) != Value::Absent).count();
        // The last of the maxima, so in reverse.
        self.0.iter().rev().max_by_key(stated)?.usage(values)
    }
}

/// Looks for the name of the model.
pub fn want_models(tree: &mut PointerTree) -> TextId {
    let model = tree.add_text();
    for pointer in MODELS {
        DOCUMENTS.iter().for_each(|root| tree.want_text(*root, &known_pointer(pointer), model));
    }
    model
}

/// Where a request names its model. All APIs that name it in the body have it there.
pub fn requested_model() -> JsonPointer {
    known_pointer(MODELS[0])
}

fn known_pointer(text: &str) -> JsonPointer {
    JsonPointer::parse(text).unwrap_or_default()
}

impl FormatSlots {
    fn want(format: &Format, tree: &mut PointerTree) -> FormatSlots {
        let mut slots: Vec<(Part, SlotId)> = Vec::new();
        for (name, part) in format.members {
            let known = slots.iter().find(|(known, _)| known == part).map(|(_, slot)| *slot);
            let slot = known.unwrap_or_else(|| tree.add_slot());
            if known.is_none() {
                slots.push((*part, slot));
            }
            for place in format.places {
                let pointer = known_pointer(&format!("{place}{name}"));
                DOCUMENTS.iter().for_each(|root| tree.want_number(*root, &pointer, slot));
            }
        }
        FormatSlots(slots)
    }

    fn usage(&self, values: &Values) -> Option<Usage> {
        let mut parts = Vec::new();
        for (part, slot) in &self.0 {
            match values.get(*slot) {
                Value::Absent => {}
                Value::Unreadable | Value::TooGreat | Value::Array(_) => return None,
                Value::Number(number) => parts.push((*part, number)),
            }
        }
        let get = |part: Part| parts.iter().find(|(stated, _)| *stated == part).map(|(_, number)| *number);
        let number = |part: Part| get(part).unwrap_or(Decimal::ZERO);
        let whole = if get(Input).is_none() && get(Output).is_none() { get(Total) } else { get(Input) };
        if parts.is_empty() {
            return None;
        }
        // A part that is greater than its whole stands beside it.
        let rest = |whole: Decimal, part: Decimal| whole.checked_sub(part).unwrap_or(whole);
        let mut usage = Usage::default();
        usage[Kind::Input] =
            rest(whole.unwrap_or(Decimal::ZERO), number(CachedOfInput)).saturating_add(number(MoreInput));
        usage[Kind::CachedInput] = number(CachedOfInput).saturating_add(number(Cached));
        usage[Kind::CacheWrite] = number(CacheWrite);
        usage[Kind::Output] = rest(number(Output), number(ReasoningOfOutput));
        usage[Kind::Reasoning] = number(ReasoningOfOutput).saturating_add(number(Reasoning));
        Some(usage)
    }
}
