// Plain greedy decoding with llama.cpp: node plain.mjs MODEL.gguf PROMPTS_DIRECTORY [PER_KIND] [MAX_TOKENS] [THREADS]
// Prints one JSON line: tokens per second after the first token, over all prompts and for each kind.
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { getLlama } from "node-llama-cpp";

const [modelPath, directory, perKind = "2", maxTokens = "48", threads = "2"] = process.argv.slice(2);
if (!modelPath || !directory) {
    console.error("usage: node plain.mjs MODEL.gguf PROMPTS_DIRECTORY [PER_KIND] [MAX_TOKENS] [THREADS]");
    process.exit(2);
}
const llama = await getLlama({ gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error" });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({ contextSize: 4096, threads: Number(threads) });

async function decode(prompt) {
    const text = `<|im_start|>user\n${prompt}<|im_end|>\n<|im_start|>assistant\n`;
    const sequence = context.getSequence();
    let tokens = 0, started = 0;
    for await (const _ of sequence.evaluate(model.tokenize(text, true), { temperature: 0, yieldEogToken: true })) {
        tokens += 1;
        if (tokens === 1) started = performance.now();
        if (tokens === Number(maxTokens)) break;
    }
    const seconds = (performance.now() - started) / 1000;
    sequence.dispose();
    return { tokens: tokens - 1, seconds };
}

const kinds = {};
for (const file of readdirSync(directory).filter((name) => name.endsWith(".jsonl")).sort()) {
    const lines = readFileSync(join(directory, file), "utf8").split("\n").filter(Boolean).map((line) => JSON.parse(line));
    for (const { kind, prompt } of lines.slice(0, Number(perKind))) {
        const { tokens, seconds } = await decode(prompt);
        const total = (kinds[kind] ??= { tokens: 0, seconds: 0 });
        total.tokens += tokens;
        total.seconds += seconds;
    }
}
const rate = (part) => part.tokens / part.seconds;
const all = Object.values(kinds).reduce((a, b) => ({ tokens: a.tokens + b.tokens, seconds: a.seconds + b.seconds }));
const byKind = Object.fromEntries(Object.entries(kinds).map(([kind, part]) => [kind, rate(part)]));
console.log(JSON.stringify({ benchmark: "llama.cpp plain", decode_tokens_per_s: rate(all), kinds: byKind }));
process.exit(0);
