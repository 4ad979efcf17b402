// A small part of Markdown as DOM nodes: headings, lists, quotes, fenced code, emphasis, code, links. Nothing is ever
// parsed as HTML, so a text can only become these elements; links lead to http, https and mailto alone.
"use strict";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*([^*\s](?:[^*]{0,2000}[^*\s])?)\*\*|\*([^*\s](?:[^*]{0,2000}[^*\s])?)\*|\[([^\]\n]{1,500})\]\(([^()\s]{1,2000})\)/s;

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function link(text, target) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  const made = element("a", text);
  made.href = url.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

function inline(parent, text, depth = 0) {
  let rest = text;
  while (rest) {
    const match = depth < 4 ? INLINE.exec(rest) : null;
    if (!match) break;
    parent.append(rest.slice(0, match.index));
    const [whole, , code, strong, soft, label, target] = match;
    if (code !== undefined) parent.append(element("code", code.trim() || code));
    else if (strong !== undefined) inline(parent.appendChild(element("strong")), strong, depth + 1);
    else if (soft !== undefined) inline(parent.appendChild(element("em")), soft, depth + 1);
    else parent.append(link(label, target) || whole);
    rest = rest.slice(match.index + whole.length);
  }
  parent.append(rest);
}

function codeBlock(lines, language) {
  const block = element("pre", element("code", lines.join("\n")));
  if (language) block.dataset.language = language;
  block.append(copyButton(() => lines.join("\n"), "Copy code"));
  return block;
}

function copyButton(text, label) {
  const button = element("button", "Copy");
  button.type = "button";
  button.className = "copy";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "No access"; // pages that are not served from this machine or by TLS may not
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

// Fill `parent` with what `text` says. Linear in the text but for emphasis, which looks ahead 2,000 characters.
function markdown(parent, text) {
  parent.replaceChildren();
  const lines = text.split("\n");
  let paragraph = [], list = null, quote = null;
  const flush = () => {
    if (paragraph.length) inline(parent.appendChild(element("p")), paragraph.join("\n"));
    if (quote) inline(parent.appendChild(element("blockquote")), quote.join("\n"));
    paragraph = [];
    list = quote = null;
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    let match;
    if ((match = FENCE.exec(line))) {
      flush();
      const [, fence, language] = match;
      const code = [];
      while (++i < lines.length && !(lines[i].trimStart().startsWith(fence) && !lines[i].trim().slice(fence.length).replaceAll(fence[0], ""))) {
        code.push(lines[i]);
      }
      parent.append(codeBlock(code, language));
    } else if ((match = HEADING.exec(line))) {
      flush();
      inline(parent.appendChild(element(`h${Math.min(6, match[1].length + 2)}`)), match[2]);
    } else if (RULE.test(line)) {
      flush();
      parent.append(element("hr"));
    } else if ((match = QUOTE.exec(line))) {
      if (!quote) flush(), (quote = []);
      quote.push(match[1]);
    } else if ((match = ITEM.exec(line))) {
      const [, indent, mark, content] = match;
      const name = /\d/.test(mark) ? "ol" : "ul";
      if (!list || (list.localName !== name && !indent)) {
        flush();
        list = parent.appendChild(element(name));
        if (name === "ol") list.start = parseInt(mark, 10);
      }
      const item = list.appendChild(element("li"));
      if (indent.length > 1) item.className = "deeper";
      inline(item, content);
    } else if (!line.trim()) {
      if (!list || !ITEM.test(lines[i + 1] || "")) flush();
    } else if (list && /^\s/.test(line)) {
      inline(list.lastChild, `\n${line.trim()}`);
    } else {
      if (list || quote) flush();
      paragraph.push(line);
    }
  }
  flush();
}
