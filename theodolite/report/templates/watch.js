// A page that asks for itself again, takes over what has changed, and says how long the training has been silent.
document.addEventListener("DOMContentLoaded", () => {
  const root = document.getElementById("watch");
  const line = document.getElementById("heard");
  const renewed = () => [...document.querySelectorAll("[data-renewed], script[id^='data-']")];
  let tag = null, answered = true, silent = null, patience = 0, since = performance.now();

  function spoken(seconds) {
    for (const [size, unit] of [[86400, "day"], [3600, "hour"], [60, "minute"]]) {
      const count = Math.floor(seconds / size);
      if (count) return `${count} ${unit}${count > 1 ? "s" : ""}`;
    }
    return `${Math.floor(seconds)} s`;
  }
  function say() {
    const seconds = silent === null ? null : silent + (performance.now() - since) / 1000;
    const stopped = seconds !== null && seconds > patience;
    line.classList.toggle("warned", !answered || stopped);
    const text = !answered ? "No answer: theodolite watch was ended. This is what it showed last."
      : seconds === null ? "Waiting for the first look."
      : stopped ? `Silent for ${spoken(seconds)}: the training has ended, or seems to have stopped.`
      : `Heard ${spoken(seconds)} ago.`;
    if (line.textContent !== text) line.textContent = text;
  }
  function take(other) {
    if (other.getElementById("watch").dataset.shape !== root.dataset.shape) return location.reload();
    for (const part of renewed()) {
      const its = part.id ? other.getElementById(part.id) : other.querySelector(`[data-renewed="${part.dataset.renewed}"]`);
      if (part.textContent !== its.textContent) part.replaceChildren(...its.childNodes);
    }
    document.dispatchEvent(new Event("renewed"));
  }
  async function ask() {
    try {
      const response = await fetch("/", { cache: "no-cache" });
      answered = response.ok;
      const heard = response.headers.get("Theodolite-Silent");
      [silent, since] = [heard === null ? null : Number(heard), performance.now()];
      patience = Number(response.headers.get("Theodolite-Patience"));
      const its = response.headers.get("ETag");
      if (answered && its !== tag) {
        take(new DOMParser().parseFromString(await response.text(), "text/html"));
        tag = its;
      }
    } catch {
      answered = false;
    }
    say();
    setTimeout(ask, 1000 * root.dataset.every);
  }
  setInterval(say, 1000);
  ask();
});
