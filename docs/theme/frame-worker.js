// Browsers start no worker from a page that was opened from disk. The search then works in a frame instead.
"use strict";
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(url, location.href);
      this.loaded = new Promise((done) => script.addEventListener("load", done));
      frame.contentDocument.body.append(script);
    }

    async postMessage(data) {
      await this.loaded;
      this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
    }
  };
